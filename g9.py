import sys,time,threading
from paceline.actors.text import TextCodec
from paceline.actors.grammar import *
c=TextCodec.load("/root/.cache/paceline/smollm2-135m"); V=c.vocab_size
t=time.time(); g=c.grammars(V); print("build %.2f"%(time.time()-t), V)
gap=[0.0]
def tick():
    last=time.time()
    while True:
        time.sleep(0.005); n=time.time(); gap[0]=max(gap[0],n-last); last=n
threading.Thread(target=tick,daemon=True).start(); time.sleep(.05)
x='{"properties":{'+",".join(f'"{i:x}":{{}}' for i in range(6500))+'}}'
print(len(x))
gap[0]=0; t=time.time(); s=from_json_schema(x); g.check(s); print("props6500 check %.2f gap %.2f"%(time.time()-t,gap[0]),len(s))
gap[0]=0; t=time.time(); m=g.matcher(s); print("matcher %.2f gap %.2f"%(time.time()-t,gap[0]))
gap[0]=0; t=time.time(); m.allowed((),(1,)); print("mask %.2f gap %.2f"%(time.time()-t,gap[0]))
del m
s=from_regex("(a{1000}){1000}"); m=g.matcher(s); gap[0]=0; t=time.time(); m.allowed((),(1,)); print("rx mask %.2f gap %.2f"%(time.time()-t,gap[0]))
import numpy as np
s=from_json_schema('{}'); m=g.matcher(s); t=time.time(); 
for i in range(20): m.allowed((),(1,))
print("json mask ms",(time.time()-t)/20*1e3)
t=time.time()
for i in range(3000): c.piece(i+1000)
print("piece us",(time.time()-t)/3000*1e6)
