"""Train an image encoder, an audio encoder and a GPT together, where microbatches may lack a picture or a sound.

    python examples/train_multimodal.py --graph branch                                         # all in this process
    torchrun --standalone --nproc-per-node 4 examples/train_multimodal.py --graph colocated    # one stage a process

``--graph`` is how the parts meet. All three train the same model to the same losses:

chain      vision -> audio -> lm, one stage each at least. Every microbatch walks through all of them, with its picture
           and its sound or without, and each stage passes on what the later ones need.
branch     on the same stages; the encoders run beside each other, and a microbatch skips those that it has no use for.
colocated  the same graph, with a piece of each part on every stage.

The data is generated: noisy stripes, noisy tones, and texts such as "see rows hear low 2 3 4 5", whose second and
fourth word are known from picture and sound alone.
"""

import argparse
import math
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import rrfp

WIDTH, HEADS, LAYERS, PATCH, FRAME = 32, 4, 4, 4, 16
PICTURES, SOUNDS = ("nothing", "rows", "columns", "squares"), ("silence", "low", "middle", "high")
WORDS = (*map(str, range(10)), *PICTURES, *SOUNDS, "see", "hear")


class Block(nn.TransformerEncoderLayer):
    """A transformer block; where it is causal, no word sees a later one."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        y: Tensor = super().forward(x, mask, is_causal=self.causal)
        return y


class Patches(nn.Module):
    """Pictures of any size to vectors, one for each square of 4 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, WIDTH, PATCH, PATCH)

    def forward(self, pictures: Tensor) -> Tensor:
        return nn.functional.gelu(self.project(pictures)).flatten(2).transpose(1, 2)


class Frames(nn.Module):
    """Sounds of any length to vectors, one for every 16 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv1d(1, WIDTH, FRAME, FRAME)

    def forward(self, sounds: Tensor) -> Tensor:
        return nn.functional.gelu(self.project(sounds)).transpose(1, 2)


class Start(nn.Module):
    """Words to vectors, behind those of the picture and the sound, where there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(len(WORDS), WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, words: Tensor, image: Tensor | None = None, sound: Tensor | None = None) -> Tensor:
        text: Tensor = self.words(words) + self.positions(torch.arange(words.shape[1]))
        return torch.cat([each for each in (image, sound, text) if each is not None], 1)


class Piece(nn.Sequential):
    """Layers in a row; the first may take several arguments."""

    def forward(self, *args: Tensor, **kwargs: Tensor | None) -> Tensor:
        first, *others = self
        x: Tensor = first(*args, **kwargs)
        for layer in others:
            x = layer(x)
        return x


class Passing(nn.Module):
    """A piece in a chain: changes one of the values that a microbatch carries, if it is there, and passes on all."""

    def __init__(self, piece: nn.Module, index: int) -> None:
        super().__init__()
        self.piece, self.index = piece, index

    def forward(self, *values: Tensor | None) -> tuple[Tensor | None, ...]:
        value = values[self.index]
        return (*values[: self.index], None if value is None else self.piece(value), *values[self.index + 1 :])


#: The first layer of each part, in the order of the arguments of `Start`.
FIRST: dict[str, type[nn.Module]] = {"lm": Start, "vision": Patches, "audio": Frames}


def build(part: str, number: int, pieces: int) -> nn.Module:
    """One of the ``pieces`` of a part. Each layer has a seed of its own: the model is the same however it is cut."""
    layers: list[nn.Module] = []
    for layer in range(LAYERS):
        torch.manual_seed(LAYERS * list(FIRST).index(part) + layer)
        if layer * pieces // LAYERS == number:
            if layer == 0:
                layers.append(FIRST[part]())
            layers.append(Block(causal=part == "lm"))
            if layer == LAYERS - 1 and part == "lm":
                layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(WORDS))]
    return Piece(*layers)


@dataclass(frozen=True)
class Layout:
    """Which pieces of which part each stage holds."""

    form: str
    stages_of: dict[str, list[int]]

    @classmethod
    def of(cls, form: str, stages: int) -> "Layout":
        """Spread the parts over ``stages`` stages; a ConfigError if they are too few or too many."""
        fewest, most = (1, LAYERS) if form == "colocated" else (3, LAYERS + 3)
        if not fewest <= stages <= most:
            raise rrfp.ConfigError(f"the number of stages is {stages}, must be {fewest}..{most} with --graph {form}")
        every, encoders = list(range(stages)), 2 if stages < 5 else 3
        if form == "colocated":
            return cls(form, dict.fromkeys(FIRST, every))
        return cls(form, {"vision": every[: encoders - 1], "audio": [encoders - 1], "lm": every[encoders:]})

    def graph(self) -> rrfp.Graph | None:
        """The parts and what they read; None for a chain, which needs no graph."""
        if self.form == "chain":
            return None
        graph = rrfp.Graph()
        vision = graph.part("vision", stages=self.stages_of["vision"], optional=True)
        audio = graph.part("audio", stages=self.stages_of["audio"], optional=True)
        graph.part("lm", stages=self.stages_of["lm"], reads={"image": vision, "sound": audio})
        return graph

    def modules(self, stage: int) -> Any:
        """Those of ``stage``: by part, or in a chain its only one."""
        pieces = {
            part: build(part, stages.index(stage), len(stages))
            for part, stages in self.stages_of.items()
            if stage in stages
        }
        if self.form != "chain":
            return pieces
        ((part, piece),) = pieces.items()
        return piece if part == "lm" else Passing(piece, list(FIRST).index(part))


@dataclass(frozen=True)
class Batch:
    """Lists by microbatch. A microbatch has pictures, sounds, both or neither: None stands for those it lacks."""

    texts: list[Tensor]
    pictures: list[Tensor | None]
    sounds: list[Tensor | None]

    @classmethod
    def drawn(cls, microbatches: int, size: int, generator: torch.Generator) -> "Batch":
        """Microbatches of ``size`` texts; the same on all ranks, because their generator is."""
        batch = cls([], [], [])
        for _ in range(microbatches):
            has_picture, has_sound = (torch.rand(2, generator=generator) < torch.tensor([0.6, 0.4])).tolist()
            picture, sound = torch.randint(1, 4, (2, size, 1), generator=generator)
            height, width = torch.randint(2, 6, (2,), generator=generator).tolist()
            frames, count = torch.randint(4, 16, (2,), generator=generator).tolist()
            batch.pictures.append(_stripes(picture, height, width, generator) if has_picture else None)
            batch.sounds.append(_tones(sound, frames, generator) if has_sound else None)
            batch.texts.append(_sentences(picture * has_picture, sound * has_sound, count))
        return batch

    @property
    def targets(self) -> list[Tensor]:
        """What follows each word."""
        return [text[:, 1:] for text in self.texts]

    def arguments(self, form: str, *, senses: bool = True) -> dict[str, Any]:
        """Those of ``pipe.step``; without ``senses``, as if no microbatch had a picture or a sound."""
        texts = [text[:, :-1] for text in self.texts]
        pictures, sounds = (own if senses else [None] * len(texts) for own in (self.pictures, self.sounds))
        # What a microbatch's time grows with: words, patches and frames.
        units = [(text, 1) for text in texts], [(own, PATCH**2) for own in pictures], [(own, FRAME) for own in sounds]
        sizes = [sum(own.numel() // unit for own, unit in each if own is not None) for each in zip(*units, strict=True)]
        common = {"targets": self.targets, "weights": [text.numel() for text in texts], "sizes": sizes}
        if form == "chain":
            return {**common, "inputs": list(zip(texts, pictures, sounds, strict=True))}
        inputs = {"vision": pictures, "audio": sounds, "lm": texts}
        visits = {part: [value is not None for value in inputs[part]] for part in ("vision", "audio")}
        return {**common, "inputs": inputs, "visits": visits}


def _stripes(kind: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Noisy pictures of so many patches: kind 1 has dark and bright rows, 2 columns, 3 both."""
    rows, columns = (torch.arange(PATCH * patches) // 2 % 2 * 2.0 - 1 for patches in (height, width))
    kind = kind[:, :, None, None]
    clean = torch.where(kind == 2, 1.0, rows[:, None]) * torch.where(kind == 1, 1.0, columns)
    return clean + 0.3 * torch.randn(clean.shape, generator=generator)


def _tones(kind: Tensor, frames: int, generator: torch.Generator) -> Tensor:
    """Noisy waves of 1, 2 or 3 periods a frame."""
    clean = torch.sin(2 * math.pi / FRAME * kind[:, :, None] * torch.arange(FRAME * frames))
    return clean + 0.3 * torch.randn(clean.shape, generator=generator)


def _sentences(picture: Tensor, sound: Tensor, count: int) -> Tensor:
    """What is seen and heard, and ``count`` numbers from the sum of both kinds on."""
    see, hear = (torch.full_like(picture, WORDS.index(word)) for word in ("see", "hear"))
    seen, heard = WORDS.index(PICTURES[0]) + picture, WORDS.index(SOUNDS[0]) + sound
    return torch.cat((see, seen, hear, heard, (picture + sound + torch.arange(count)) % 10), 1)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next word; what precedes the text are picture and sound."""
    return nn.functional.cross_entropy(logits[:, -targets.shape[1] :].flatten(0, 1), targets.flatten())


def arguments() -> tuple[argparse.Namespace, rrfp.Topology | None, Layout]:
    """The command line, this rank's topology, None without torchrun, and what the stages hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="branch", choices=("chain", "branch", "colocated"))
    parser.add_argument("--stages", type=int, default=4, help="in one process; under torchrun as many as ranks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the data")
    parser.add_argument("--hint", default="slot-aware-pyramid")
    parser.add_argument("--limit", default="2n", help="microbatches that a stage may hold: a number, n or 2n")
    args = parser.parse_args()
    try:
        topology = rrfp.Topology.from_env() if dist.is_torchelastic_launched() else None
        return args, topology, Layout.of(args.graph, topology.stages if topology else args.stages)
    except rrfp.ConfigError as error:  # the same on all ranks: rank 0 prints it, and torchrun ends the others
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)
            parser.exit(2)
        parser.exit(2, f"{parser.prog}: {error}\n")


@record
def main() -> None:
    """Train."""
    args, topology, layout = arguments()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # so that rounding, which depends on the order of sums, does not show
    stages = range(args.stages) if topology is None else [topology.stage]
    modules = [layout.modules(stage) for stage in stages]
    how: Any = {"graph": layout.graph(), "loss_fn": loss_fn, "hint": args.hint, "limit": args.limit}
    pipeline = rrfp.local(modules, **how) if topology is None else rrfp.Pipeline(modules[0], topology=topology, **how)
    owned = nn.ModuleList(each for own in modules for each in (own.values() if isinstance(own, dict) else [own]))
    optimizer = torch.optim.AdamW(owned.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed)
    is_first = topology is None or topology.rank == 0
    times: list[float] = []
    with pipeline as pipe:
        for step in range(1, args.steps + 1):
            batch = Batch.drawn(args.microbatches, args.microbatch_size, generator)
            started = time.perf_counter()
            result = pipe.step(**batch.arguments(args.graph))
            optimizer.step()
            optimizer.zero_grad()
            times.append((time.perf_counter() - started) * 1e3)
            if is_first and (step <= 3 or step % 10 == 0):
                print(f"step {step:3d}  loss {result.loss:.6f}  {times[-1]:5.0f} ms", flush=True)
        batch = Batch.drawn(args.microbatches, args.microbatch_size, generator)
        score, without = (pipe.evaluate(**batch.arguments(args.graph, senses=senses)) for senses in (True, False))
        if is_first:
            print(f"held-out loss {score.loss:.6f}, without pictures and sounds {without.loss:.6f}")
        if is_first and times:
            print(f"{args.graph}: median step {statistics.median(times):.0f} ms")


if __name__ == "__main__":
    main()
