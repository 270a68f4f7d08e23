import sys,time
sys.path.insert(0,'/work/main/tests')
from pathlib import Path
from test_text import write_tokenizer
from paceline.actors.text import TextCodec
from paceline.actors.grammar import *
import tempfile, numpy as np
if len(sys.argv)>2: c=TextCodec.load(sys.argv[2]); V=c.vocab_size
else:
    d=Path(tempfile.mkdtemp()); write_tokenizer(d,"byte_level"); c=TextCodec.load(d); V=330
t=time.time(); g=c.grammars(V); print("build %.2f"%(time.time()-t))
J,R,E=from_json_schema,from_regex,from_ebnf
cases=[
("ref",J,'{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'),
("maxitems",J,'{"type":"array","minItems":1000000000}'),
("maxlen",J,'{"type":"string","minLength":1000000000}'),
("maxlen2",J,'{"type":"string","maxLength":100000}'),
("pattern",J,'{"type":"string","pattern":"(a{1000}){1000}"}'),
("props",J,'{"properties":{'+",".join(f'"k{i}":{{}}' for i in range(4000))+'}}'),
("amb",E,'root ::= root root | "a" | ""'),
("amb2",E,'root ::= root root root root | "a" | "" | "aa" | [a-z]'),
("rep",E,'start: A{1000000000}\nA: "a"'),
("rep2",E,'start: (A{1,30000}){1,30000}\nA: "a"'),
("rex",E,'start: /(a{1000}){1000}/'),
("sub",E,'start: %regex {"substring_chars": "'+'ab'*30000+'"}'),
("emptyre",R,'[^\\s\\S]'),
("many",E,'start: '+' | '.join(f'/.*{chr(97+i%26)}.{{{i}}}x/' for i in range(500))),
("many2",E,'start: ('+' | '.join(f'/[a-z]*{chr(97+i%26)}[a-z]{{{i%30}}}/' for i in range(1500))+')+'),
("and",E,'start: A\nA: /(.*a.{15}b.*)/ & /(.*c.{15}d.*)/ & ~/(.*ef.{9}.*)/'),
("exp",R,'(a|b)*a(a|b){20}(a|b)*b(a|b){20}'),
("pow",R,'.*a.{100}|.*b.{99}|.*c.{98}|.*d.{97}'),
]
import signal
class TO(Exception): pass
def h(*a): raise TO()
signal.signal(signal.SIGALRM,h)
rng=np.random.default_rng(0)
for n,f,x in cases:
    try:
        t=time.time(); s=f(x); g.check(s); tc=time.time()-t
    except Exception as e: print(n,"refused",str(e)[:90],"%.2f"%(time.time()-t)); continue
    try:
        t=time.time(); m=g.matcher(s); tm=time.time()-t
    except Exception as e: print(n,"matcher",str(e)[:100],"%.2f"%(time.time()-t)); continue
    ts=[];err=""
    for i in range(12):
        t=time.time()
        try:
            a=m.allowed((),(1,)); ts.append(time.time()-t); nz=[q for q in np.nonzero(a)[0] if q!=1]
            if not nz: err="dead/only end"; break
            m.advance([int(rng.choice(nz))])
        except GrammarError as e: ts.append(time.time()-t); err=str(e)[:100]; break
    print(n,"check %.2f matcher %.2f masks max %.3f sum %.3f n %d %s"%(tc,tm,max(ts),sum(ts),len(ts),err),flush=True)
