"""Parameter groups of `Muon`: their validation, and a function that builds them from a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from quantshard.errors import ConfigurationError
from quantshard.state_storage import ADAMW, MUON

ALGORITHM = "algorithm"
"""Group entry that chooses the algorithm: `MUON` or `ADAMW`."""

ADAMW_SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True, "adam_w_mode": True}
"""Default entries of "adamw" groups, except lr."""

MUON_ENTRIES = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
ADAMW_ENTRIES = ("betas", "bias_correction", "adam_w_mode")
"""`MUON_ENTRIES` have no effect in "adamw" groups, and `ADAMW_ENTRIES` none in "muon" groups."""


def completed(defaults: Mapping[str, Any], number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group to add as number `number`, with the defaults of "adamw" groups filled in if it is one.

    Raises:
        ConfigurationError: the algorithm is unknown; an entry has no effect; a parameter of a "muon" group is not a
            matrix; or an "adamw" group has no lr and Muon's lr does not suit it.
    """
    group = dict(given)
    algorithm = group.setdefault(ALGORITHM, defaults[ALGORITHM])
    if algorithm not in (MUON, ADAMW):
        raise ConfigurationError(f"Muon: group {number} has {ALGORITHM} = {algorithm!r}; use {MUON!r} or {ADAMW!r}")
    if unused := [name for name in (ADAMW_ENTRIES if algorithm == MUON else MUON_ENTRIES) if name in group]:
        raise ConfigurationError(
            f"Muon: group {number} has {', '.join(unused)}, which would do nothing, since its {ALGORITHM} is "
            f"{algorithm!r}; leave it out"
        )
    if algorithm == MUON:
        _check_matrices(number, group["params"])
        return group
    if "lr" not in group and defaults["adjust_lr_fn"] != "match_rms_adamw":
        raise ConfigurationError(
            f"Muon: group {number}, of {ADAMW!r}, has no lr of its own; Muon's, {defaults['lr']}, suits AdamW only "
            "with adjust_lr_fn='match_rms_adamw'. Give one, as muon_groups(model, adamw={'lr': 3e-4}) does"
        )
    return {**ADAMW_SETTINGS, **group}


def _check_matrices(number: int, params: Iterable[Any]) -> None:
    pairs = (entry if isinstance(entry, tuple) else (f"number {index}", entry) for index, entry in enumerate(params))
    invalid = [f"{name} {tuple(param.shape)}" for name, param in pairs if param.ndim != 2]
    if invalid:
        raise ConfigurationError(
            f"Muon: group {number} has parameters that are no matrices: {', '.join(invalid[:8])}"
            + (f" and {len(invalid) - 8} more" if len(invalid) > 8 else "")
            + f". Give these, embeddings and the output head to AdamW, in a group with {ALGORITHM!r}: {ADAMW!r}, as "
            "optimizers.muon_groups(model, adamw={'lr': 3e-4}) does"
        )


def muon_groups(
    model: nn.Module,
    *,
    head: str | Iterable[str] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Split a model's named parameters into groups for `Muon`: matrices of hidden layers, and everything else for
    AdamW.

    AdamW gets embeddings (weights of `nn.Embedding` and parameters tied to them), the output head, and all parameters
    that are not 2-D: norms, biases, stacked experts. Vectors form a separate group without weight decay.

        optimizer = Muon(muon_groups(model, head="lm_head", adamw={"lr": 3e-4, "betas": (0.9, 0.95)}), lr=0.02)

    Args:
        model: the model, already sharded if it will be.
        head: names or patterns (such as `*.gate.weight`) of modules or parameters for AdamW: the layer that computes
            the logits, and any others. () means that there is none. By default the head is detected from
            `get_output_embeddings` (transformers models) or from being tied to an embedding.
        adamw: entries of the "adamw" groups: lr, betas, eps, weight_decay (for parameters with two dims or more).

    Raises:
        ConfigurationError: the head cannot be detected, or a name matches nothing.
    """
    if unknown := sorted({*(adamw or {})} - {"lr", *ADAMW_SETTINGS}):
        raise ConfigurationError(
            f"muon_groups(adamw=...): {', '.join(map(repr, unknown))} is no entry of AdamW's groups; there are lr, "
            f"{', '.join(ADAMW_SETTINGS)}"
        )
    named = list(model.named_parameters())
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    adamw_ids = embedded | (_found_head(model, embedded) if head is None else _matching(named, head))
    groups = {
        MUON: [(name, param) for name, param in named if param.ndim == 2 and id(param) not in adamw_ids],
        "others": [
            (name, param) for name, param in named if param.ndim > 2 or (param.ndim == 2 and id(param) in adamw_ids)
        ],
        "vectors": [(name, param) for name, param in named if param.ndim < 2],
    }
    settings = {ALGORITHM: ADAMW, **(adamw or {})}
    result: list[dict[str, Any]] = [
        {"params": groups[MUON], ALGORITHM: MUON},
        {"params": groups["others"], **settings},
        {"params": groups["vectors"], **settings, "weight_decay": 0.0},
    ]
    return [group for group in result if group["params"]]


def _found_head(model: nn.Module, embedded: set[int]) -> set[int]:
    """Return the ids of the parameters of the layer that computes the logits."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Module):
        return {id(param) for param in output.parameters(recurse=False)}
    if len(embedded) > 0 and _is_tied(model, embedded):
        return set()
    weighted_modules = [name for name, module in model.named_modules() if getattr(module, "weight", None) is not None]
    raise ConfigurationError(
        "muon_groups(model): which layer gives the logits is not known, and it should be AdamW's; name it, as "
        f"head={weighted_modules[-1] if weighted_modules else 'lm_head'!r}, or give head=() if there is none"
    )


def _is_tied(model: nn.Module, embedded: set[int]) -> bool:
    """Whether a layer other than an embedding uses an embedding's weight."""
    other_modules = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    return any(id(param) in embedded for module in other_modules for param in module.parameters(recurse=False))


def _matching(named: Sequence[tuple[str, Tensor]], patterns: str | Iterable[str]) -> set[int]:
    matched = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        ids = [id(param) for name, param in named if any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))]
        if not ids:
            raise ConfigurationError(
                f"muon_groups(model, head={pattern!r}): no module or parameter has that name; parameters are "
                f"{', '.join(name for name, _ in named[:5])}, ..."
            )
        matched.update(ids)
    return matched


def _prefixes(name: str) -> Iterator[str]:
    """Yield a parameter's name and the names of the modules that contain it."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))
