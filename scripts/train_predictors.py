"""Train predictors of activation sparsity for a model that makes zeros (ReLU and its relatives).

For each layer, a small network predicts from the input of the feed-forward block which neurons will be active, and
from the input of attention which heads (Comet, section 4.1). This is `private-llm predictors train`, with its options::

    python scripts/train_predictors.py --model facebook/opt-125m --text a.txt --text b.txt --test unseen.txt
    python scripts/train_predictors.py --model MODEL --dataset NAME [--dataset CONFIGURATION] --block 16 --out folder
    python scripts/train_predictors.py ... --resume            # go on where an interrupted run stopped
    python scripts/train_predictors.py ... --plot picture.png  # recall and levels by layer (Figure 17)
    python scripts/train_predictors.py --tiny                  # a few seconds, with the bundled model and text

It needs ``pip install private-llm[train]``, and ``[plot]`` for pictures.
"""

import sys
from pathlib import Path

from private_llm_cli.app import main

DATA = Path(__file__).resolve().parent.parent / "integrations/private_llm_hf/data"
TINY = {
    "--text": DATA / "shakespeare.txt", "--test": DATA / "heldout.txt", "--rows": 4096, "--test-rows": 2048,
    "--length": 64, "--batch": 16, "--epochs": 1, "--rank": 16, "--threads": 1,
}  # fmt: skip


def spelled_out(words: list[str]) -> list[str]:
    """Options with those of --tiny that are not given."""
    if "--tiny" not in words:
        return words
    more = [str(word) for pair in TINY.items() if pair[0] not in words for word in pair]
    return [*(word for word in words if word != "--tiny"), *more]


if __name__ == "__main__":
    sys.argv[1:] = ["predictors", "train", *spelled_out(sys.argv[1:])]
    main()
