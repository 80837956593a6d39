"""Private images: which digit is this? The parties see neither picture nor answer, nor the network's weights.

    python examples/classify_images.py

Uses the small network and the handwritten digits that come with the package. `ring=32` is enough for convolutions and
ReLU and halves the traffic; `reveal="class"` opens only the most likely class, not ten logits.
"""

from __future__ import annotations

import torch
from private_llm_hf import AutoPrivateModelForImageClassification, PrivateConfig
from private_llm_hf.vision.networks import digits, digits_model

COUNT = 40


def main() -> None:
    """Classify some digits that the network never saw in training."""
    images, labels = (part[:COUNT] for part in digits(held_out=True))
    config = PrivateConfig(ring=32, frac_bits=10, reveal="class")
    with torch.no_grad(), AutoPrivateModelForImageClassification.from_pretrained(digits_model(), config) as private:
        classes = private(images).argmax(-1)  # of a class that was opened, a one in its place
        print("classes:", *classes.tolist()[:10], "...")
        print("labels: ", *labels.tolist()[:10], "...")
        print(f"right:    {int((classes == labels).sum())} of {COUNT}")
        print("cost:    ", repr(private.cost()))


if __name__ == "__main__":
    main()
