# random walk: a Matcher that walks trees vs fresh matchers
import sys,time,random
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
def fresh(s,out,path):
    m=g.matcher(s); m.advance(list(out))
    try: a=m.allowed(path,(1,)).copy()
    except GrammarError as e: return "E"
    return a
def comp(s,out,path):
    m=g.matcher(s); m.advance(list(out))
    try: return m.complete(path)
    except GrammarError: return "E"
grs={"schema":from_json_schema('{"type":"object","properties":{"name":{"type":"string","maxLength":5},"n":{"type":"integer"}},"required":["name"]}'),
"any":from_json_schema('{}'),
"re":from_regex("(ab|cd)+x{2,4}"),
"re2":from_regex("abc"),
"ebnf":from_ebnf('root ::= "a" root "b" | "c"'),
"lark":from_ebnf('start: expr\nexpr: NUM | "(" expr "+" expr ")"\nNUM: /[0-9]+/\n%ignore /[ ]/'),
}
rng=random.Random(1)
bad=0
for name,s in grs.items():
    for trial in range(25):
        m=g.matcher(s); out=[]
        for _ in range(12):
            # random tree queries
            hist=[]
            for q in range(6):
                p=[]
                for _ in range(rng.randrange(5)):
                    if rng.random()<.85:
                        a=fresh(s,out,p)
                        if isinstance(a,str): break
                        nz=np.nonzero(a)[0]
                        if not len(nz): break
                        p.append(int(rng.choice(nz)))
                    else: p.append(rng.randrange(330))
                exp=fresh(s,out,p)
                hist.append(p)
                try: got=m.allowed(p,(1,))
                except GrammarError as e: got="E"
                if (isinstance(exp,str)!=isinstance(got,str)) or (not isinstance(exp,str) and (exp!=got).any()):
                    bad+=1; print("MASK",name,out,hist,exp if isinstance(exp,str) else exp.sum(),got if isinstance(got,str) else got.sum())
                    break
                e2=comp(s,out,p)
                try: g2=m.complete(p)
                except GrammarError: g2="E"
                if e2!=g2: bad+=1; print("COMPLETE",name,out,hist,e2,g2)
            if bad>8: sys.exit()
            # commit 1-2 allowed tokens
            a=fresh(s,out,[])
            if isinstance(a,str): break
            nz=[i for i in np.nonzero(a)[0] if i!=1]
            if not nz: break
            t=int(rng.choice(nz)); 
            try: m.advance([t])
            except GrammarError as e: print("ADVANCE",name,out,hist,t,e); bad+=1; break
            out.append(t)
            if comp(s,out,[]) is True: break
print("done",bad)
