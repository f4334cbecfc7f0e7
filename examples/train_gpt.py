"""Train a byte-level GPT across pipeline stages, alone or together with data and tensor parallelism.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py
    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --pp 2 --tp 2 --dp 2 --steps 3

All but the five lines that mention ``pipe`` is an ordinary PyTorch training script.
"""

import argparse
import os
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rrfp

WIDTH, HEADS, LAYERS, LENGTH = 96, 4, 4, 128


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            # -1: with tensor parallelism, the heads of this rank
            product(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))
        return y

    def shard(self, mesh: DeviceMesh) -> None:
        """Give each rank of ``mesh`` some of the heads and hidden units."""
        columns = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        parallelize_module(self, mesh, {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()})


class Embedding(nn.Module):
    """Bytes and positions to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return x


def build_stage(stage: int, stages: int) -> nn.Module:
    """A stage's part of the model, the same on all its ranks."""
    torch.manual_seed(stage)
    parts: list[nn.Module] = [Embedding()] if stage == 0 else []
    parts += [Block() for layer in range(LAYERS) if layer * stages // LAYERS == stage]
    if stage == stages - 1:
        parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)]
    return nn.Sequential(*parts)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(data: Tensor, microbatches: int, size: int, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets, lists by microbatch; the same on all ranks of a replica, because their generator is."""
    starts = torch.randint(len(data) - LENGTH - 1, (microbatches, size, 1), generator=generator)
    tokens = data[starts + torch.arange(LENGTH + 1)].long()
    return list(tokens[..., :-1].unbind()), list(tokens[..., 1:].unbind())


def arguments() -> tuple[argparse.Namespace, rrfp.Topology]:
    """The command line, and this rank's topology."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, help="pipeline stages; by default as many as the other two leave")
    parser.add_argument("--dp", type=int, default=1, help="replicas, each with its own data")
    parser.add_argument("--tp", type=int, default=1, choices=(1, 2, 4), help="ranks that share a stage's heads")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--microbatches", type=int, default=24)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients together")
    parser.add_argument("--hint", default="bf")
    parser.add_argument("--split", action="store_true", help="input gradients at once, weight gradients later")
    parser.add_argument("--limit", default="2n", help="microbatches that a stage may hold: a number, 1f1b, n or 2n")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps; 0: never")
    parser.add_argument("--text", type=argparse.FileType("rb"), help="the text to learn; default: Python's reference")
    args = parser.parse_args()
    pp = {} if args.pp is None else {"pp": args.pp}
    try:
        topology = rrfp.Topology.from_env(dims={**pp, "dp": args.dp, "tp": args.tp})
        if topology.stages > LAYERS:
            raise rrfp.ConfigError(f"--pp is {topology.stages}, must be at most {LAYERS}, one for each layer")
        return args, topology
    except rrfp.ConfigError as error:  # the same on all ranks: rank 0 prints it, and torchrun ends the others
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)
            parser.exit(2)
        parser.exit(2, f"{parser.prog}: {error}\n")


def join(topology: rrfp.Topology) -> None:
    """Initialise torch.distributed, with keys of this restart: gloo would else read addresses from before it."""
    store, rank, world = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=PrefixStore(str(topology.restart), store), rank=rank, world_size=world)


def main() -> None:
    """Train."""
    args, topology = arguments()
    torch.set_num_threads(1)
    join(topology)
    mesh = init_device_mesh("cpu", (topology.stages, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))
    module = build_stage(topology.stage, topology.stages)
    for part in module.children() if args.tp > 1 else ():
        if isinstance(part, Block):
            part.shard(mesh["tp"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    text = args.text.read() if args.text else "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    training, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    generator = torch.Generator().manual_seed(topology.replica)

    def draw(part: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return batch(part, args.microbatches, args.microbatch_size, generator)

    how = {"hint": args.hint, "split": args.split, "limit": args.limit, "transport": args.transport}
    pipeline = rrfp.Pipeline(module, mesh=mesh, loss_fn=loss_fn, **how)
    with pipeline.blocking() as pipe:
        for step in range(1, args.steps + 1):
            started = time.perf_counter()
            result = pipe.step(*draw(training))
            norm = pipe.clip_grad_norm_(args.clip)
            optimizer.step()
            optimizer.zero_grad()
            if topology.rank == 0 and (step <= 3 or step % 10 == 0):
                idle = sum(part.blocking_share for part in result.breakdown) / topology.stages
                took = (time.perf_counter() - started) * 1e3
                print(
                    f"step {step:4d}  loss {result.loss:.3f}  norm {norm:.2f}  {took:5.0f} ms  idle {idle:4.0%}",
                    flush=True,
                )
            if args.evaluate_every and step % args.evaluate_every == 0:
                score = pipe.evaluate(*draw(held_out))
                if topology.rank == 0:
                    print(f"step {step:4d}  held-out loss {score.loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    record(main)()
