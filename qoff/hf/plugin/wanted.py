"""Which parameters of a transformers model are quantized while it is loaded."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from qoff.errors import QuantizationError, UnsupportedModelError
from qoff.hf.packed.derived import is_router
from qoff.models.modules.structure import ROUTERS, is_conv1d, is_linear
from qoff.quant.matrix import ROUTER_BITS

from .config import QoffConfig
from .experts_form import activation_of, experts_form, experts_of

_EXACT = (
    # What linear attention forgets by.
    *(".in_proj_ba", ".in_proj_a", ".in_proj_b", ".a_proj"),
    # The same of KDA, as what lies beside it.
    *(".f_proj", ".f_a_proj", ".f_b_proj", ".g_a_proj", ".b_proj"),
    *(".indexer.wk", ".indexer.weights_proj"),  # what tokens are chosen by
    *(".laurel.linear_left", ".laurel.linear_right"),  # of Gemma 3n, as what follows
)
_STREAMS = ("altup_projections", "altup_unembed_projections")  # lists of matrices
_OF_STREAMS = (".altup.modality_router", ".altup.prediction_coefs", ".altup.correction_coefs")
_IN_ROUTERS = (".gate.wg", ".router.proj", ".router.gate")  # linears, of Hunyuan, Gemma 4, AFMoE


def quantizable(model: PreTrainedModel, config: QoffConfig) -> dict[str, int]:
    """Which parameters of a model are quantized as they arrive, with how many bits.

    Raises QuantizationError where the group does not divide the columns, UnsupportedModelError for
    experts whose form qoff does not know.
    """
    head = model.get_output_embeddings()
    found: dict[str, int] = {}
    experts, routers = experts_of(model), []
    for name, module in model.named_modules():
        if not should_convert_module(name, config.modules_to_not_convert):
            experts.pop(name, None)
            continue
        plain = is_linear(module) or is_conv1d(module)
        if name.endswith(_OF_STREAMS):  # vectors in a checkpoint
            continue
        of_streams = name.rpartition(".")[0].endswith(_STREAMS)
        if isinstance(module, nn.Embedding) or ((module is head or of_streams) and plain):
            found[f"{name}.weight"] = config.head_bits
        elif plain and name.endswith(_IN_ROUTERS):
            routers.append(f"{name}.weight")
        elif plain and (name.endswith(_EXACT) or name.split(".")[-1] in ROUTERS):
            found[f"{name}.weight"] = ROUTER_BITS
        elif is_router(module):
            routers.append(f"{name}.weight")
        elif plain:
            found[f"{name}.weight"] = config.bits
        elif name in experts:
            own = (key for key, p in module.named_parameters(recurse=False) if p.dim() > 2)
            found.update({f"{name}.{key}": config.bits for key in own})
    if experts:
        found.update(dict.fromkeys(routers, ROUTER_BITS))
    for target, source in model.all_tied_weights_keys.items():
        if (target in found) != (source in found):  # one of two that share a weight stays as it is
            found.pop(target, None)
            found.pop(source, None)
    activation = activation_of(model) if experts else None
    forms = {name: experts_form(module, activation) for name, module in experts.items()}
    for name, form in forms.items():
        if form is None:
            raise UnsupportedModelError(
                f"{name}: qoff cannot pack experts in a {type(experts[name]).__name__}; name them "
                "in modules_to_not_convert"
            )
    for name in found:
        path = name.rpartition(".")[0]
        form = forms.get(path)
        turned = (form is not None and form.transposed) or is_conv1d(model.get_submodule(path))
        columns = model.get_parameter(name).shape[-2 if turned else -1]
        if columns % config.group_size:
            raise QuantizationError(
                f"{name}: group_size {config.group_size} does not divide its {columns} columns; "
                "choose another, or name it in modules_to_not_convert"
            )
    return found
