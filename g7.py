import sys,time,random,itertools
sys.path.insert(0,'/work/main/tests')
from pathlib import Path
from test_text import write_tokenizer
from paceline.actors.text import TextCodec
from paceline.actors.grammar import *
from paceline.actors.constraints import Shaper
from paceline.actors.values import Constraints
from paceline.actors.tree import DraftTree, NewNode, ROOT
import tempfile, numpy as np, torch
d=Path(tempfile.mkdtemp()); 
write_tokenizer(d,"byte_level")
c=TextCodec.load(d)
g=c.grammars(330)
D=c._tokenizer.decode
from paceline.kernels.triton_verify import _edited,_paths
s=from_json_schema('{}')
con=Constraints(grammar=s,ends=(1,))
# tree below '[':  '9', '[', '9 ', '[ '
t=DraftTree(1).grow([NewNode(1,ROOT,27,-.1),NewNode(2,ROOT,61,-.1),NewNode(3,1,223,-.1),NewNode(4,2,223,-.1)],1).tree
sub=t.subtree([1,2,3,4])
rows=torch.zeros(5,330)
def S(): return Shaper(con,(5,),(61,),330,g.matcher)
ed,f=_edited(rows,sub,S())
for p,r in zip(_paths(sub),ed):
    ref=S()(torch.zeros(330),p)
    print(repr(D(list(p))), int((r>-1).sum()), int((ref>-1).sum()), "WRONG" if not torch.equal(r,ref) else "")
# fix by deep_copy?
def A2(m,p):
    k=m._matcher.deep_copy()
    k.try_consume_tokens(list(p)); 
    w=np.zeros_like(m._words); k.unsafe_compute_mask_ptr(w.ctypes.data,w.nbytes); return int(np.unpackbits(w.view(np.uint8)).sum())
m=g.matcher(s); m.advance([61])
print("deep_copy:",[A2(m,p) for p in [(27,223),(61,223),(27,),(61,223)]])
t0=time.time()
for _ in range(200): m._matcher.deep_copy()
print("deep_copy cost us",(time.time()-t0)/200*1e6)
# poison
s=from_regex("b*|(a{1000}){1000}")
con2=Constraints(grammar=s,ends=(1,))
a,b=[i for i in range(330) if D([i])=="a"][0],[i for i in range(330) if D([i])=="b"][0]
t=DraftTree(1).grow([NewNode(1,ROOT,a,-.1),NewNode(2,1,a,-.1)],1).tree
sub=t.subtree([1,2])
sh=Shaper(con2,(5,),(),330,g.matcher)
rows=torch.zeros(3,330); rows[0,b]=5
t0=time.time(); ed,f=_edited(rows,sub,sh); print("edited",time.time()-t0,f)
print("root draw", D([int(ed[0].argmax())]))
try: print(sh.end((b,)))
except Exception as e: print("end() after a draft:",type(e).__name__,e)
sh=Shaper(con2,(5,),(),330,g.matcher); sh(rows[0],()); print("end() without:",sh.end((b,)))
