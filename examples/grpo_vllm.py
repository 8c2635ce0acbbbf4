"""GRPO on 2 processes under FSDP2, with a vLLM engine that gets the trainer's FP8 codes after every step.

    torchrun --nproc-per-node 2 examples/grpo_vllm.py FOLDER [LAYOUT]   # a folder in memory, such as /dev/shm/policy

    rank 0, rank 1: FSDP2 --publish--> FOLDER/step --update--> vLLM (a process of VLLM_PYTHON)
                      ^------------- samples and their log-probabilities -----------'

The reward is the share of even tokens. A step prints how many parameters changed in the engine and how far the
log-probabilities of engine and trainer differ: less than with LAYOUT plain-bf16, which sends values instead of codes.
"""

import hashlib
import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

import quantshard as qs

TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
PROMPT, SAMPLES, TOKENS, STEPS = [1, 5, 9, 13], 16, 12, 3


def serve(folder, descriptor):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, which hashes its parameters
    from vllm import LLM, SamplingParams

    options = {"dtype": "bfloat16", "max_model_len": 64, "gpu_memory_utilization": 0.3, "enforce_eager": True}
    llm = LLM(str(qs.serving.published(folder)[-1]), skip_tokenizer_init=True, **options)
    receiver = qs.serving.VLLMReceiver(llm)
    sampling = SamplingParams(n=SAMPLES, max_tokens=TOKENS, min_tokens=TOKENS, logprobs=0, detokenize=False, seed=0)

    def parameters(model):
        named = {name: param.data.contiguous().view(torch.uint8) for name, param in model.named_parameters()}
        return {name: hashlib.sha256(value.numpy()).digest() for name, value in named.items()}

    trainer = Connection(int(descriptor))
    while trainer.recv() == "sample":
        receiver.update(folder)
        (out,) = receiver.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        logprobs = [[step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)] for o in out.outputs]
        trainer.send(([list(o.token_ids) for o in out.outputs], logprobs, llm.apply_model(parameters)[0]))


def train(folder, layout="compressed-tensors-fp8-channel"):
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("gloo")  # on GPUs "nccl", and model and tokens there
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, vocab_size=256)  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    qs.convert(model, qs.recipe.Float8RowwiseScaling(use_power_2_scales=False))  # as vLLM scales activations
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = qs.optimizers.FusedAdam(model.named_parameters(), lr=1e-3)
    weights = qs.serving.LiveWeights(model, layout)
    engine, before = None, {}
    for step in range(STEPS + 1):
        qs.serving.publish(weights, folder, step)
        batch = [None]
        if dist.get_rank() == 0:
            if engine is None:
                engine, end = Pipe()
                python = os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")
                command = [python, __file__, "serve", folder, str(end.fileno())]
                env = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
                process = subprocess.Popen(command, env=env, pass_fds=[end.fileno()])
                end.close()  # so that recv() raises if the engine dies
            engine.send("sample")
            batch = [engine.recv()]
        dist.broadcast_object_list(batch)
        sampled, served, after = batch[0]
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        completions = torch.tensor(sampled)[mine]
        ids = torch.cat([torch.tensor(PROMPT).expand(len(completions), -1), completions], 1)
        logits = model(input_ids=ids).logits[:, len(PROMPT) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, completions.unsqueeze(-1)).squeeze(-1)
        rewards = (torch.tensor(sampled) % 2 == 0).float().mean(1)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[mine, None]
        # PPO's ratio is 1 up to the difference between engine and trainer, which importance sampling corrects
        ratio = (logprobs - torch.tensor(served)[mine]).exp()
        (-(ratio * advantages).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            changed = sum(after[name] != digest for name, digest in before.items())
            differences = (logprobs - torch.tensor(served)[mine]).abs()
            counts = f"{changed} of {len(after)} parameters changed in the engine"
            print(f"step {step}: reward {rewards.mean():.3f}, {counts}, "
                  f"log-probabilities differ by {differences.max():.4f} (mean {differences.mean():.5f})")  # fmt: skip
            before = after
    if dist.get_rank() == 0:
        engine.send("stop")
        process.wait(60)
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1] == "serve" else train(*sys.argv[1:])
