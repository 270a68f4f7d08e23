# drafter with the smaller vocabulary: Open with output token beyond it and a penalty
import sys
sys.path.insert(0,'/work/main/tests')
from pathlib import Path
import tempfile, torch
from tiny_models import tiny_model
from paceline.actors.torch_engine import TorchEngine
from paceline.actors.drafters import *
from paceline.actors.drafter import DrafterLoop
from paceline.actors.values import *
from paceline.actors.messages import Open, encode, Verdict
from paceline.actors.schedules import plan_of
from paceline.actors.link import LinkUp, Received
m=tiny_model("llama",vocab_size=64,eos_token_id=1,max_position_embeddings=128)
eng=TorchEngine(m.requires_grad_(False),1024,16)
dr=ModelDrafter(eng)
class L:
    name="l"
    def send(self,d): return True
    def close(self): pass
loop=DrafterLoop(dr); loop.add_link(L())
loop.inbox.put(LinkUp("l",1))
con=Constraints(repetition_penalty=1.1)
loop.inbox.put(Received("l",1,encode(Open(0,1,(3,4,5,70),Sampling(),plan_of(Speculation("sync")),10,3,con))))
try:
    loop.take(0); loop.turn(); print("survived", dict(loop.counters))
except BaseException as e: print("LOOP DIED:",type(e).__name__,e)
loop=DrafterLoop(ModelDrafter(eng)); loop.add_link(L()); loop.inbox.put(LinkUp("l",1))
loop.inbox.put(Received("l",1,encode(Open(0,1,(3,4,5,70),Sampling(),plan_of(Speculation("sync")),10,3,FREE))))
loop.take(0); loop.turn(); print("no constraints: survived", dict(loop.counters))
loop.inbox.put(Received("l",1,encode(Open(1,2,(3,4,5),Sampling(),plan_of(Speculation("sync")),10,3,con))))
loop.take(0); loop.turn()
loop.inbox.put(Received("l",1,encode(Verdict(1,2,3,(70,),plan_of(Speculation("sync"))))))
loop.take(0); loop.turn(); print("reroot: survived", dict(loop.counters))
