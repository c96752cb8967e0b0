import time, torch, sys, cProfile, pstats
import fused_ops
from benchmarks.point_attention_kernels import Shape, plain, wall
torch.manual_seed(0)
s=Shape("plain", torch.bfloat16,1,256)
call,inputs,params=plain(s)
wanted=[x.requires_grad_() for x in (*inputs,*params)]
cot=torch.randn_like(inputs[0])
with torch.no_grad():
    print("no_grad fwd", wall(lambda: call(*inputs)))
print("grad fwd", wall(lambda: call(*inputs)))
print("fwd+bwd", wall(lambda: torch.autograd.grad(call(*inputs),wanted,cot)))
from fused_ops.invariant_point_attention.op import OPERATOR
args=call._operands(*inputs)
out=torch.ops.fused_ops.invariant_point_attention_forward_saving.default(*args)
print("saving op", wall(lambda: torch.ops.fused_ops.invariant_point_attention_forward_saving.default(*args)))
needs=[getattr(args[i],"requires_grad",False) for i in OPERATOR.differentiable]
bop=torch.ops.fused_ops.invariant_point_attention_backward_cuda.default
with torch.no_grad():
    print("backward op", wall(lambda: bop(cot,out[1],out[2],*args,needs)))
    only=[False]*len(needs); only[0]=True
    print("backward op node only", wall(lambda: bop(cot,out[1],out[2],*args,only)))
    only=[False]*len(needs); only[1]=True
    print("backward op pair only", wall(lambda: bop(cot,out[1],out[2],*args,only)))
    only=[False]*len(needs); only[-1]=True
    print("backward op out bias only", wall(lambda: bop(cot,out[1],out[2],*args,only)))
def t(f,n=200):
    torch.cuda.synchronize(); 
    for _ in range(5): f()
    a=time.perf_counter()
    for _ in range(n): f()
    b=time.perf_counter()-a
    torch.cuda.synchronize(); return b/n*1e6
print("host us of bwd op", t(lambda: bop(cot,out[1],out[2],*args,needs),60))
x=torch.empty(8,device='cuda')
print("empty us", t(lambda: torch.empty(8,device='cuda')))
def step():
    return torch.autograd.grad(call(*inputs),wanted,cot)
p=cProfile.Profile(); 
for _ in range(5): step()
p.enable()
for _ in range(100): step()
p.disable(); torch.cuda.synchronize()
pstats.Stats(p).sort_stats("tottime").print_stats(14)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,torch.profiler.ProfilerActivity.CUDA]) as w:
    for _ in range(10): step()
    torch.cuda.synchronize()
print(w.key_averages().table(sort_by="self_cpu_time_total",row_limit=28,max_name_column_width=60)[:6500])
