"""lm-eval, unchanged, scores a private model by URL, and the plaintext model beside it: the scores are the same.

    python examples/evaluate_lm_eval.py          the first questions of each task
    python examples/evaluate_lm_eval.py 100      as many as there are

Wants `pip install '.[gateway]' 'lm-eval[api]'`, and starts `private-llm gateway` with the small model that comes with
the package. With a gateway that runs already, the command line of lm-eval does it (`OPENAI_API_KEY` is the gateway's
token, `CLIENT` the model owner's folder `client`):

    lm_eval run --model local-completions --include_path examples/lm_eval_tasks --tasks private_which_word \\
        --model_args model=NAME,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=CLIENT,add_bos_token=True
"""

from __future__ import annotations

import os
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from private_llm_gateway.child import child_gateway

FOLDER = str(resources.files("private_llm_hf") / "demo_model")
TASKS = ["private_next_word", "private_which_word", "private_write_on"]


def scores(model: str, settings: dict[str, Any], limit: int) -> dict[str, dict[str, Any]]:
    """What lm-eval measures, by task."""
    manager = TaskManager(include_path=str(Path(__file__).parent / "lm_eval_tasks"), include_defaults=False)
    made = simple_evaluate(
        model=model, model_args={**settings, "add_bos_token": True}, tasks=TASKS, task_manager=manager, limit=limit,
        bootstrap_iters=0,
    )  # fmt: skip
    return dict(made["results"])


def main(limit: int) -> None:
    """Score both, and print a row for each measure."""
    plain = scores("hf", {"pretrained": FOLDER, "device": "cpu", "dtype": "float32"}, limit)
    with child_gateway() as gateway:
        os.environ["OPENAI_API_KEY"] = gateway.token
        settings = {"model": "demo", "base_url": f"{gateway.openai_url}/completions", "tokenizer": FOLDER}
        private = scores("local-completions", {**settings, "max_length": 512}, limit)
    for task in TASKS:
        for name, value in private[task].items():
            if "," in name and "stderr" not in name:
                measure = f"{task} {name.partition(',')[0]}:"
                print(f"{measure:<34}private {value:.4f}, plaintext {plain[task][name]:.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
