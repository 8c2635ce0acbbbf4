import sys; sys.path.insert(0,'/work/wt-plan')
import os; os.environ["TRITON_INTERPRET"]="1"
import itertools
from tests.planning.counted import *
from tests.distributed.pool import run_ranks
from dataclasses import replace
S=TrainSettings(hidden=256,heads=4,ffn=704,layers=4,seq_length=512,global_batch=4)
def step(model, optimizer, settings, counter, tokens):
    parts=tokens.chunk(settings.micro_batches)
    for number, part in enumerate(parts):
        models.reduce_gradients(model, now=number==len(parts)-1)
        counter.phase="forward"
        loss = models.loss(model(part[:, :-1]), part[:, 1:])/len(parts)
        counter.look()
        counter.phase="backward"
        loss.backward()
        counter.look()
    del loss
    counter.phase="optimizer step"
    counter.look()
    grads=[p.grad.to_local() for p in model.parameters()]
    torch.stack([g.double().square().sum() for g in grads]).sum()
    del grads
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
def measured(settings, checkpointed):
    settings=settings.resolved()
    with host.without_device():
        mesh=MeshSpec(dp_shard=dist.get_world_size()) if settings.dp_replicate==1 else MeshSpec(dp_replicate=2,dp_shard=dist.get_world_size()//2)
        model=models.build(settings, recipe.resolve(settings.recipe), mesh.device_mesh("cpu"))
        optimizer=make_optimizer(model, settings)
        for layer in model.layers if checkpointed else ():
            layer.forward=partial(qs.checkpoint, layer.forward)
        per=settings.global_batch//dist.get_world_size()
        tokens=torch.randint(0,257,(per,settings.seq_length+1))
        given=held_by(model,optimizer)
        static=sum(t.untyped_storage().nbytes() for t in {t.untyped_storage()._cdata:t for t in given}.values())
        counter=StorageCounter([*given,tokens])
        with counter:
            step(model,optimizer,settings,counter,tokens)
            counter.most.clear()
            step(model,optimizer,settings,counter,tokens)
    return static, dict(counter.most)
def planned(settings, ranks, checkpointed):
    settings=settings.resolved()
    model=models.LanguageModel(settings, recipe.resolve(settings.recipe),"meta")
    axes={"dp_shard":ranks} if settings.dp_replicate==1 else {"dp_replicate":2,"dp_shard":ranks//2}
    st=qs.TrainingStep(settings.global_batch//ranks//settings.micro_batches, settings.seq_length, settings.micro_batches, loss=lambda m,t,g: models.loss(m(t),g), checkpoint_activations=checkpointed, forward_prefetch=True, reduce_dtype=settings.torch_reduce_dtype, norm_dtype=torch.float64, capability=(10,0))
    return qs.plan(model,axes,layers=model.layers,reshard_after_forward=settings.reshard_after_forward,step=st).memory
if __name__=="__main__":
    for ranks, rec, cp, ch in [(1,"delayed",False,{}),(1,"block",True,{}),(2,"current",False,{}),(2,"mxfp8",False,dict(micro_batches=2)),(2,"bf16",False,{}),(2,"bf16",True,dict(reshard_after_forward=False)),(2,"nvfp4",True,{}),(2,"delayed",False,dict(reduce_dtype="bfloat16",architecture="gpt")), (2,"block",False,dict(dp_replicate=2))]:
        s=replace(S,recipe=rec,**ch)
        static, most=run_ranks(ranks,measured,s,cp)[0]
        m=planned(s,ranks,cp)
        print(ranks,rec,cp,ch,{p.phase:(round((static+most[p.phase])/2**20,2), round(p.total/2**20,2), f"{p.total/(static+most[p.phase])-1:+.1%}") for p in m.phases}, f"static {static/2**20:.2f} vs {(m.phases[0].bytes['weights']+m.phases[0].bytes['optimizer states'])/2**20:.2f}", flush=True)
