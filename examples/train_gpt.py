"""Train a byte-level GPT across pipeline stages, alone or together with data and tensor parallelism.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py
    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --pp 2 --tp 2 --dp 2 --steps 3
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_gpt.py --checkpoint runs/gpt --resume

All but the lines that mention ``pipe`` is an ordinary PyTorch training script.
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
from rrfp import callbacks, checkpoint

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


def build_chunk(number: int, chunks: int) -> dict[str, nn.Module]:
    """Modules of one of all ``chunks`` of the model, by their names in it; the same on all ranks of a stage."""
    torch.manual_seed(number)
    parts: dict[str, nn.Module] = {"embedding": Embedding()} if number == 0 else {}
    parts |= {f"blocks.{layer}": Block() for layer in range(LAYERS) if layer * chunks // LAYERS == number}
    if number == chunks - 1:
        parts |= {"norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, 256)}
    return parts


def numbers_of_chunks(stage: int, stages: int, chunks: int, placement: str) -> list[int]:
    """Which chunks of the model a stage has, by `placement`: in a V, every second row of them runs backwards."""
    rows = [list(range(row * stages, (row + 1) * stages)) for row in range(chunks)]
    return [row[~stage if placement == "v" and number % 2 else stage] for number, row in enumerate(rows)]


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
    parser.add_argument("--chunks", type=int, default=1, help="parts of the model on each stage")
    parser.add_argument("--placement", default="looped", choices=("looped", "v"), help="of the chunks")
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
    parser.add_argument("--metrics", help="a file that rank 0 appends a line of JSON a step to")
    parser.add_argument("--checkpoint", help="a folder for checkpoints, which all ranks see")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints; 0: only the last")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--amp", default="off", choices=("off", "bf16", "fp16"), help="autocast; fp16 scales the loss")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run, resumed or not")
    args = parser.parse_args()
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint, the folder to resume from")
    pp = {} if args.pp is None else {"pp": args.pp}
    try:
        topology = rrfp.Topology.from_env(dims={**pp, "dp": args.dp, "tp": args.tp})
        if not 1 <= topology.stages * args.chunks <= LAYERS:
            counts = f"--pp x --chunks is {topology.stages} x {args.chunks}"
            raise rrfp.ConfigError(f"{counts}, must be 1..{LAYERS}, with a layer for each")
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
    numbers = numbers_of_chunks(topology.stage, topology.stages, args.chunks, args.placement)
    chunks = [build_chunk(number, topology.stages * args.chunks) for number in numbers]
    modules = nn.ModuleList(nn.Sequential(*chunk.values()) for chunk in chunks)
    parts = {name: part for chunk in chunks for name, part in chunk.items()}
    for part in parts.values() if args.tp > 1 else ():
        if isinstance(part, Block):
            part.shard(mesh["tp"])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=args.lr)
    text = args.text.read() if args.text else "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    training, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    generator = torch.Generator().manual_seed(topology.replica)

    def draw(part: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return batch(part, args.microbatches, args.microbatch_size, generator)

    how = {name: getattr(args, name) for name in ("hint", "split", "limit", "transport", "placement", "deterministic")}
    how["callbacks"] = [callbacks.JsonLines(args.metrics, tokens=args.microbatch_size * LENGTH)] if args.metrics else []
    pipeline = rrfp.Pipeline(list(modules), mesh=mesh, loss_fn=loss_fn, **how)
    loaded = checkpoint.load(args.checkpoint, parts, optimizer, pipe=pipeline) if args.resume else None
    dtype = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.amp]
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "fp16")
    if loaded is not None and loaded.extra is not None:  # None: a replica that the saved run did not have
        generator.set_state(loaded.extra["data"])
        if loaded.extra["scaler"]:
            scaler.load_state_dict(loaded.extra["scaler"])
    if loaded is not None and topology.rank == 0:
        print(f"resumed after step {loaded.step} from {loaded.path}", flush=True)
    saving = None
    with pipeline as pipe:
        pipe.scale(scaler)
        for step in range(1 if loaded is None else loaded.step + 1, args.steps + 1):
            started = time.perf_counter()
            with torch.autocast("cpu", dtype, enabled=args.amp != "off"):
                result = pipe.step(*draw(training))
            scaler.unscale_(optimizer)
            norm = pipe.clip_grad_norm_(args.clip)
            scaler.step(optimizer)
            scaler.update()
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
            if args.checkpoint and (step == args.steps or (args.save_every and step % args.save_every == 0)):
                extra = {"data": generator.get_state(), "scaler": scaler.state_dict()}
                saving = checkpoint.async_save(args.checkpoint, parts, optimizer, pipe=pipe, extra=extra, keep=3)
                if topology.rank == 0:
                    print(f"step {step:4d}  saves to {saving.path}", flush=True)
        if saving is not None:
            saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    record(main)()
