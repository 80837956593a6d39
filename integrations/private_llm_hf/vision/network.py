"""Networks of one's own as transformers' models, for plans, share files and estimates: `Network` runs a description."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from private_llm.errors import PatchMismatch
from private_llm_hf.vision.description import FUNCTIONS, build_module, check_description, users_of
from private_llm_hf.vision.tracing import describe_module


class NetworkConfig(PretrainedConfig):  # type: ignore[misc]
    """The configuration of a network: its description, and [channels, height, width] of its images if known."""

    model_type = "network"
    network: dict[str, Any] | None = None
    image_shape: list[int] | None = None


class Network(PreTrainedModel):  # type: ignore[misc]
    """A network of standard modules, run from its description. Called with images it returns logits (a tensor).

    Module names are those of the original. `Network.of(module)` makes one; `save_pretrained` stores it as JSON and
    safetensors, which `AutoPrivateModelForImageClassification.from_pretrained` and `private-llm share` read. Raises
    PatchMismatch for a description with steps or modules that there are not.
    """

    config_class = NetworkConfig
    main_input_name = "pixel_values"
    base_model_prefix = "entire_network"  # with an empty one, loading takes "11.weight" for "1.weight"

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        self._description = check_description(config.network)
        modules = self._description["modules"]
        for name in dict.fromkeys(step["module"] for step in self._description["steps"] if "module" in step):
            self._place(name, build_module(modules[name]))
        self._last_use: dict[int, list[int]] = {}  # values that are not needed after a step
        for source, places in users_of(self._description["steps"]).items():
            self._last_use.setdefault(places[-1], []).append(source)
        self.post_init()

    @classmethod
    def of(cls, module: nn.Module, image_shape: Sequence[int] | None = None) -> "Network":
        """The network of a module, sharing its weights. Raises PatchMismatch for what has no rule, listing names.
        image_shape: channels, height and width, for those who want to know (estimates); any that fits can be used.
        """
        description, modules = describe_module(module)
        shape = None if image_shape is None else list(image_shape)
        with torch.device("meta"):
            made = cls(NetworkConfig(network=description, image_shape=shape, architectures=[cls.__name__]))
        for name, original in modules.items():
            copy = made.get_submodule(name)
            copy._parameters.update(original._parameters)
            copy._buffers.update(original._buffers)
        made.eval()
        return made

    def _init_weights(self, module: nn.Module) -> None:
        """Modules initialise themselves."""

    def _place(self, name: str, module: nn.Module) -> None:
        *path, last = name.split(".")
        parent: nn.Module = self
        for part in (*path, last):
            if hasattr(type(parent), part) or part in parent.__dict__:
                raise PatchMismatch(f"module name {name!r} is taken by PyTorch or transformers; rename it")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.ModuleDict())
            parent = parent.get_submodule(part)
        parent.add_module(last, module)

    def forward(self, pixel_values: Tensor, return_dict: bool = False) -> Tensor | ImageClassifierOutputWithNoAttention:
        """Images [B, ...] to the network's own output; with return_dict logits, without the head."""
        steps, head = self._description["steps"], self._description["head"]
        if return_dict and head is not None:
            steps = steps[:-1]
        values: list[Any] = [pixel_values]
        for place, step in enumerate(steps, 1):
            args = [_filled(arg, values) for arg in step["args"]]
            options = {key: _filled(value, values) for key, value in step.get("options", {}).items()}
            run = self.get_submodule(step["module"]) if "module" in step else FUNCTIONS[step["function"]]
            values.append(run(*args, **options))
            for done in self._last_use.get(place, ()):
                values[done] = None
        return ImageClassifierOutputWithNoAttention(logits=values[-1]) if return_dict else values[-1]

    @staticmethod
    def finish(output: ImageClassifierOutputWithNoAttention | tuple[Tensor], config: NetworkConfig) -> Tensor:
        """What the client makes of opened logits: the network's own output, after its head."""
        description = check_description(config.network)
        head = description["head"]
        logits: Tensor = output[0] if head is None else build_module(description["modules"][head])(output[0])
        return logits

    def layers_before(self) -> dict[str, str]:
        """For each module the module whose output it alone takes, where both run once: what may be merged."""
        steps = self._description["steps"]
        runs = [step.get("module") for step in steps]
        found = {}
        for source, places in users_of(steps).items():
            before = runs[source - 1] if source else None
            after = runs[places[0] - 1] if len(places) == 1 else None
            if before is not None and after is not None and runs.count(before) == runs.count(after) == 1:
                found[after] = before
        return found


def _filled(value: Any, values: list[Any]) -> Any:  # noqa: ANN401 - JSON in, tensors and numbers out
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    return values[value["value"]] if isinstance(value, dict) else value


AutoConfig.register(NetworkConfig.model_type, NetworkConfig)
AutoModelForImageClassification.register(NetworkConfig, Network)
