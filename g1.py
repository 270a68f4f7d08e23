import sys,time,threading
sys.path.insert(0,'/work/main/tests')
from pathlib import Path
from test_text import write_tokenizer
from paceline.actors.text import TextCodec
from paceline.actors.grammar import *
import tempfile
d=Path(tempfile.mkdtemp()); 
write_tokenizer(d,"byte_level")
c=TextCodec.load(d)
t=time.time(); g=c.grammars(330); print("build",time.time()-t)
def tryit(name,f):
    t=time.time()
    try: r=f(); s="ok"
    except BaseException as e: r=None; s=f"{type(e).__mro__[:3]} {str(e)[:150]}"
    print(f"{name}: {time.time()-t:.3f}s {s}")
    return r
deep="["*60000
tryit("deep json",lambda:from_json_schema('{"a":'+ "["*30000+"]"*30000+"}"))
tryit("nan",lambda:from_json_schema('{"minimum":NaN}'))
tryit("surr",lambda:from_json_schema('{"const":"\\ud800"}'))
tryit("surrkey",lambda:from_json_schema('{"\\ud800":1}'))
tryit("bigint",lambda:from_json_schema('{"minimum":'+"1"*4000+'}'))
tryit("inf",lambda:from_json_schema('{"minimum":1e999}'))
nest='{"type":"object","properties":{"a":'*1500+'{}'+'}}'*1500
s=tryit("nest",lambda:from_json_schema(nest))
if s: tryit("nest check",lambda:g.check(s))
for name,rx in [("exp","(a|b)*a(a|b){20}"),("rep","(a{1000}){1000}"),("rep2","((a{0,1000}){0,1000}){0,1000}"),("and",".*a.{25}b"),("uni","\\p{L}{5000}"),("uni2","(\\p{L}|\\d){1,60000}"),("nestedparen","("*30000+"a"+")"*30000),("opt","(a?){30000}a{30000}"),("alts","|".join(f"(.*{chr(97+i%26)}.{{{i%50}}})" for i in range(2000)))]:
    s=tryit(name+" from",lambda:from_regex(rx))
    if s:
        tryit(name+" check",lambda:g.check(s))
        m=tryit(name+" matcher",lambda:g.matcher(s))
        if m: tryit(name+" mask",lambda:m.allowed((),(1,)))
