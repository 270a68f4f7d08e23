import sys,time,random,itertools
sys.path.insert(0,'/work/main/tests')
from pathlib import Path
from test_text import write_tokenizer
from paceline.actors.text import TextCodec
from paceline.actors.grammar import *
import tempfile, numpy as np
d=Path(tempfile.mkdtemp()); 
write_tokenizer(d,"byte_level")
c=TextCodec.load(d)
g=c.grammars(330)
s=from_json_schema('{}')
print({t:c._tokenizer.decode([t]) for t in (61,18,71,20,27,200,223)})
def A(m,p):
    try: return set(np.nonzero(m.allowed(p,(1,)))[0].tolist())
    except GrammarError as e: return str(e)
def run(hist,comp=True):
    m=g.matcher(s); m.advance([61])
    for p in hist:
        r=A(m,p)
        if comp:
            try: m.complete(p)
            except GrammarError: pass
    return r
H=[[18, 71, 20], [61], [27, 200, 223], [61, 223]]
f=run([H[-1]]); print("fresh",f if isinstance(f,str) else [c._tokenizer.decode([t]) for t in f])
for k in range(len(H)):
    for sub in itertools.combinations(H[:-1],k):
        for comp in (True,False):
            r=run([*sub,H[-1]],comp)
            print(sub,comp,r==f, len(r) if not isinstance(r,str) else r)
import llguidance; print(llguidance.__version__ if hasattr(llguidance,'__version__') else '')
m=g.matcher(s); m.advance([61]); print(A(m,[61]), "path that is allowed?", 61 in A(m,[]))
m=g.matcher(s); m.advance([61,61,223]); x=A(m,[]); print("advance 3", len(x), x==f)
m=g.matcher(s); m.advance([61]); m.advance([61]); m.advance([223]); x=A(m,[]); print("advance 1x3", len(x), x==f)
m=g.matcher(s); 
for t in (61,61,223): m.allowed((),(1,)); m.advance([t])
x=A(m,[]); print("plain decode", len(x), x==f)
