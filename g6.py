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
D=c._tokenizer.decode
def A(m,p):
    try: return set(np.nonzero(m.allowed(p,(1,)))[0].tolist())
    except GrammarError as e: return str(e)
s=from_json_schema('{}')
def run(hist,pre=(61,)):
    m=g.matcher(s); m.advance(list(pre))
    for p in hist: r=A(m,p)
    return len(r)
print("one mask then", run([(27,200,223),(61,223)]))
print("all prefixes", run([(),(27,),(27,200),(27,200,223),(61,),(61,223)]), run([(27,),(27,200),(27,200,223),(61,),(61,223)]), run([(),(61,),(27,),(27,200),(27,200,223),(61,223)]))
print("bfs", run([(),(27,),(61,),(27,200),(61,223)]),run([(),(27,),(61,),(27,223),(61,223),(27,223,223),(61,223)]))
for h in [[(27,200),(61,223)],[(27,223),(61,223)],[(27,223,223),(61,223)],[(27,200,223),(61,)],[(27,200,223),()],[(27,200,223),(61,61)],[(27,200,223),(223,)], [(27,),(61,223)],[(223,223),(61,223)],[(27,200,223),(27,200)],[(27,200,223),(27,223)],[(27,200,223),(27,200,223)]]:
    print(h, run(h), "fresh", run(h[-1:]))
# BFS tree fuzz, like triton _edited, chain trees with w children each
rng=random.Random(3)
ws=[200,201,204,223]
bad=n=0; t0=time.time()
def fresh(out,p):
    m=g.matcher(s); m.advance(list(out)); return A(m,p)
while time.time()-t0<60:
    # random out
    out=[]
    for _ in range(rng.randrange(0,8)):
        a=fresh(out,())
        if isinstance(a,str): break
        cc=[t for t in a if t!=1]
        if not cc: break
        w=[t for t in cc if t in ws]; st=[t for t in cc if D([t]) in '[{":,']
        out.append(rng.choice(w) if w and rng.random()<.3 else rng.choice(st) if st and rng.random()<.5 else rng.choice(cc))
    m=g.matcher(s)
    try: m.advance(out)
    except GrammarError: continue
    nodes=[()]
    seen=[]
    for i in range(12):
        par=rng.choice(nodes)
        a=fresh(out,par)
        if isinstance(a,str): continue
        cc=[t for t in a if t!=1]
        if not cc: continue
        w=[t for t in cc if t in ws]
        nodes.append((*par, rng.choice(w) if w and rng.random()<.4 else rng.choice(cc)))
    for p in nodes:
        n+=1
        x,f=A(m,p),fresh(out,p); seen.append(p)
        if x!=f:
            bad+=1
            if bad<6: print("BAD", repr(D(out)), [D(q) for q in seen], len(f) if not isinstance(f,str) else f, len(x) if not isinstance(x,str) else x, flush=True)
            break
print(n,bad)
