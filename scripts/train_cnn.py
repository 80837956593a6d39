"""Train a small image classifier whose private twin is to be tried: LeNet's pattern, or residual blocks.

The network is saved as JSON and safetensors, which ``AutoPrivateModelForImageClassification.from_pretrained`` and
``private-llm classify`` read::

    python scripts/train_cnn.py --out digits_model                              # the bundled handwritten digits
    python scripts/train_cnn.py --model lenet --out lenet_model
    python scripts/train_cnn.py --dataset ylecun/mnist --model lenet --out mnist_model     # any `datasets` name
    python scripts/train_cnn.py --tiny --out tiny_model                         # a few steps

A data set needs a train and a test split (or part of train is held out), one image and one label column.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from private_llm_hf.vision.network import Network
from private_llm_hf.vision.networks import digits, lenet5, shortcut
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

CARD = """---
license: {licence}
library_name: private-llm
pipeline_tag: image-classification
---
# {title}

{parameters:,} parameters; {description}, for images of shape {shape}.

## Training data and licence

{data}

## Training

`scripts/train_cnn.py`: {steps} steps of {batch} images on {images} images, AdamW with a peak learning rate of {rate:g}
and a cosine decay to zero, weight decay {decay:g}, seed {seed}; images are shifted by up to one pixel.

## Accuracy

{accuracy:.2f} % of {held_out} images that were not trained on, in plaintext float32.

## Limits

It is there to try out private classification, not to read handwriting.
"""
DIGITS = (
    "The 1797 handwritten digits of 8 x 8 pixels that scikit-learn ships: the test part of *Optical Recognition of\n"
    "Handwritten Digits* (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998,\n"
    "[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/)). Every fifth image is held out."
)

Split = tuple[Tensor, Tensor]


def load(name: str | None, size: int | None) -> tuple[Split, Split]:
    """Training and held-out images [N, C, H, W] from 0 to 1 with labels."""
    if name is None:
        return digits(held_out=False), digits(held_out=True)
    import datasets  # an optional dependency, and slow to import

    datasets.disable_progress_bars()
    found = datasets.load_dataset(name)
    if "test" not in found:
        found = found["train"].train_test_split(test_size=0.1, seed=0)
    features = found["train"].features
    image = next((key for key, kind in features.items() if isinstance(kind, datasets.Image)), None)
    label = next((key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    if image is None or label is None:
        raise SystemExit(f"{name}: got columns {', '.join(features)}; want one image and one label column")
    first = found["train"][0][image]
    shape = (size, size) if size else first.size[::-1]
    grey = first.mode in ("1", "L")
    train, test = (tensors(found[part], image, label, shape, grey) for part in ("train", "test"))
    return train, test


def tensors(rows: Any, image: str, label: str, shape: tuple[int, int], grey: bool) -> Split:  # noqa: ANN401 - datasets
    """All images of a split in one tensor."""
    import numpy as np

    made = []
    for row in rows:
        picture = row[image].convert("L" if grey else "RGB").resize(shape[::-1])
        made.append(torch.from_numpy(np.array(picture)).reshape(*shape, -1).permute(2, 0, 1))
    return torch.stack(made) / 255.0, torch.tensor(rows[label])


def small_lenet(classes: int = 10) -> nn.Sequential:
    """LeNet's pattern for images [B, 1, 8, 8], with batch norms."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two convolutions and the input, or its projection, added."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = shortcut(inputs, outputs, stride)
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, H/stride, W/stride]."""
        made: Tensor = self.last(self.second(self.first(x)) + self.shortcut(x))
        return made


def small_resnet(channels: int = 1, classes: int = 10, width: int = 16) -> nn.Sequential:
    """Three residual blocks after a stem, for images [B, channels, H, W] of any size from 4 x 4."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes),
    )  # fmt: skip


def build(kind: str, shape: torch.Size, classes: int) -> nn.Sequential:
    """The network for images of this shape."""
    if kind == "resnet":
        return small_resnet(shape[0], classes, width=16)
    fitting = {(1, 8, 8): small_lenet, (1, 28, 28): lenet5}.get(tuple(shape))
    if fitting is None:
        raise SystemExit(f"--model lenet wants images of 8 x 8 or 28 x 28 grey pixels, not {tuple(shape)}; use resnet")
    return fitting(classes)


def shifted(images: Tensor) -> Tensor:
    """Every image moved by -1, 0 or 1 pixels in both directions, zeros coming in."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (1, 1, 1, 1))
    down, right = random.randrange(3), random.randrange(3)
    return padded[..., down : down + height, right : right + width]


def fit(args: argparse.Namespace, model: nn.Module, train: Split) -> int:
    """Train; returns the number of steps."""
    images, labels = train
    steps = args.steps or max(1, args.epochs * len(images) // args.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=args.decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=steps)
        for _ in range(steps):
            rows = torch.tensor(random.choices(range(len(images)), k=args.batch))
            loss = F.cross_entropy(model(shifted(images[rows])), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            bar.update(task, advance=1, description=f"training, loss {loss.item():.3f}")
    return steps


def accuracy(model: nn.Module, test: Split) -> float:
    """Per cent of right answers."""
    model.eval()
    with torch.no_grad():
        found = [model(batch).argmax(1) for batch in test[0].split(256)]
    return 100.0 * float((torch.cat(found) == test[1]).double().mean())


def main(args: argparse.Namespace) -> None:
    """Load, train, test, save."""
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    transformers.logging.disable_progress_bar()
    if args.tiny:
        torch.set_num_threads(1)
    train, test = load(args.dataset, args.size)
    classes = int(max(train[1].max(), test[1].max())) + 1
    shape = train[0].shape[1:]
    model = build(args.model, shape, classes)
    steps = fit(args, model, train)
    right = accuracy(model, test)
    network = Network.of(model, shape)
    network.save_pretrained(args.out)
    described = {"lenet": "LeNet's pattern of convolutions and average pools", "resnet": "three residual blocks"}
    card = CARD.format(
        licence=args.licence, title=args.title, parameters=sum(p.numel() for p in model.parameters()),
        description=described[args.model], shape=" x ".join(map(str, shape)),
        data=DIGITS if args.dataset is None else f"`{args.dataset}`; see its own page for its licence.",
        steps=steps, batch=args.batch, images=len(train[0]), rate=args.rate, decay=args.decay, seed=args.seed,
        accuracy=right, held_out=len(test[0]),
    )  # fmt: skip
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(json.dumps({"steps": steps, "accuracy": right, "held_out": len(test[0]), "out": str(args.out)}))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--dataset", metavar="NAME", help="a `datasets` name (default: the bundled digits)")
    add("--size", type=int, help="resize images to this height and width")
    add("--model", choices=["resnet", "lenet"], default="resnet", help="which network")
    add("--out", type=Path, default=Path("digits_model"), help="folder for the network and its card")
    add("--epochs", type=int, default=40, help="passes over the training images")
    add("--steps", type=int, help="exact number of steps instead")
    add("--batch", type=int, default=64, help="images a step")
    add("--rate", type=float, default=3e-3, help="peak learning rate")
    add("--decay", type=float, default=0.05, help="weight decay")
    add("--seed", type=int, default=0)
    add("--title", default="Small image classifier", help="the card's heading")
    add("--licence", default="other", help="licence tag of the card, such as cc-by-4.0")
    add("--tiny", action="store_true", help="a few steps only")
    if parser.parse_args(argv).tiny:
        parser.set_defaults(steps=20, batch=32)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
