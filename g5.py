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
def fresh(s,p):
    m=g.matcher(s); m.advance(list(p)); return A(m,())
s=from_json_schema('{}')
# minimal raw
from llguidance import LLMatcher
def raw(seq1,seq2,pre=(61,)):
    m=g.matcher(s); m.advance(list(pre))
    L=m._matcher
    assert L.try_consume_tokens(list(seq1))==len(seq1)
    L.rollback(len(seq1))
    n=L.try_consume_tokens(list(seq2)); m._path=list(seq2)
    return n, len(A(m,seq2))
print("raw no masks", raw((27,200,223),(61,223)), raw((27,200),(61,223)), raw((27,),(61,223)),raw((27,200,223),(61,)))
ws={t for t in range(330) if D([t]).strip()=="" and D([t])!=""}
print("ws",ws)
rng=random.Random(0)
# pattern CPU verify: path extends by allowed tokens, mask at each, then end() over tokens, advance; drafts random lengths
stats={}
for name,gr in {"any":s,"schema":from_json_schema('{"type":"object","properties":{"name":{"type":"string","maxLength":5},"n":{"type":"array","items":{"type":"integer"}}},"required":["name","n"]}')}.items():
  for mode in ("cpu","tree"):
    bad=n=0; ex=None
    t0=time.time()
    for trial in range(60):
        m=g.matcher(gr); out=[]
        for _ in range(10):
            if time.time()-t0>25: break
            cur=A(m,()); n+=1
            f=fresh(gr,out)
            if cur!=f: 
                bad+=1; ex=ex or (D(out),len(f) if not isinstance(f,str) else f,len(cur) if not isinstance(cur,str) else cur); break
            if isinstance(f,str): break
            cand=[t for t in f if t!=1]
            if not cand: break
            def pick(cand):
                w=[t for t in cand if t in ws]
                return rng.choice(w) if w and rng.random()<.3 else rng.choice(cand)
            def path(m_,k):
                p=[]
                for _ in range(k):
                    a=fresh(gr,out+p)
                    if isinstance(a,str): break
                    cc=[t for t in a if t!=1]
                    if not cc: break
                    p.append(pick(cc))
                return p
            if mode=="tree":
                for _ in range(3):
                    p=path(m,3)
                    for k in range(len(p)): A(m,p[:k+1])
            p=path(m,rng.randrange(1,4))
            if not p: break
            for k in range(len(p)-1): A(m,p[:k+1])
            done=False
            for k in range(1,len(p)+1):
                if m.complete(p[:k]): done=True; p=p[:k]; break
            m.advance(p); out+=p
            if done: break
    print(name,mode,"masks",n,"bad",bad,ex,flush=True)
