import sys,time
sys.path.insert(0,'/work/main/tests')
from pathlib import Path
from test_text import write_tokenizer
from paceline.actors.text import TextCodec
from paceline.actors.grammar import *
import tempfile
d=Path(tempfile.mkdtemp()); 
write_tokenizer(d,"byte_level")
c=TextCodec.load(d)
g=c.grammars(330)
rxs=["(a{1000}){1000}","((a{100}){100}){100}","((a{200}){200}){200}","(a{2000}){2000}","(ab?c?){1000}{500}","(a|b|ab|abc){1000}{1000}","(a?){1000}{1000}","([a-z]{1000}){1000}","(.{0,300}x){300}","(.*a){60}.{20}"]
kind=sys.argv[1]
rx=rxs[int(sys.argv[2])]
s=from_regex(rx)
t=time.time(); 
try: g.check(s)
except Exception as e: print(rx,"check",time.time()-t,str(e)[:80]); sys.exit()
tc=time.time()-t
t=time.time(); m=g.matcher(s); tm=time.time()-t
out=[]
path=[]
import numpy as np
for i in range(4):
    t=time.time()
    try: a=m.allowed(tuple(path),(1,))
    except Exception as e: out.append((round(time.time()-t,2),str(e)[:100])); break
    out.append(round(time.time()-t,2)); 
    nz=np.nonzero(a)[0]
    if not len(nz): break
    path.append(int(nz[-1]))
print(rx,"check %.2f matcher %.2f"%(tc,tm),out,flush=True)
