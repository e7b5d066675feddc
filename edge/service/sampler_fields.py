"""The fields of llama.cpp's server for its further samplers, and the strategies that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from ...errors import InputError
from ...runtime.strategies.strategy import Strategy, strategy
from .body_decoder import about
from .message_fields import FormatFields
from .request_error import invalid, unsupported

_OPTIONS: Final = {
    "dry_multiplier": ("dry", "multiplier"),
    "dry_base": ("dry", "base"),
    "dry_allowed_length": ("dry", "allowed_length"),
    "dry_penalty_last_n": ("dry", "last"),
    "top_n_sigma": ("top-n-sigma", "n"),
    "typical_p": ("typical", "mass"),
    "xtc_probability": ("xtc", "probability"),
    "xtc_threshold": ("xtc", "threshold"),
    "mirostat_tau": ("mirostat", "tau"),
    "mirostat_eta": ("mirostat", "eta"),
}
"""The strategy and its option, in the order in which llama.cpp applies them."""


class SamplerFields(FormatFields, kw_only=True):
    """Samplers under llama.cpp's names; each is off by default, and docs/strategies.md says what it does."""

    dry_multiplier: Annotated[float | None, about("Extension. Penalty of the strategy dry; 0 for none.")] = None
    dry_base: Annotated[float | None, about("Extension. The option base of dry.")] = None
    dry_allowed_length: Annotated[int | None, about("Extension. The option of dry.")] = None
    dry_penalty_last_n: Annotated[int | None, about("Extension. The option last of dry.")] = None
    dry_sequence_breakers: Annotated[list[str] | None, about("Extension. The option breakers of dry.")] = None
    top_n_sigma: Annotated[float | None, about("Extension. The strategy top-n-sigma; 0 or less for none.")] = None
    typical_p: Annotated[float | None, about("Extension. The strategy typical; 1 for none.")] = None
    xtc_probability: Annotated[float | None, about("Extension. The strategy xtc; 0 for none.")] = None
    xtc_threshold: Annotated[float | None, about("Extension. The option threshold of xtc.")] = None
    mirostat: Annotated[int | None, about("Extension. 2 for the strategy mirostat, 0 for none.")] = None
    mirostat_tau: Annotated[float | None, about("Extension. The option tau of mirostat.")] = None
    mirostat_eta: Annotated[float | None, about("Extension. The option eta of mirostat.")] = None

    def strategies_of_samplers(self) -> list[Strategy]:
        """The strategies that are switched on.

        Raises:
            RequestError: a value is out of range, or mirostat is of version 1.
        """
        if self.mirostat not in (None, 0, 2):
            raise unsupported("mirostat", f"mirostat is {self.mirostat}", "give 2 for mirostat 2.0, or 0 for none")
        breakers = "".join(self.dry_sequence_breakers or ())
        if self.dry_sequence_breakers and len(breakers) > len(self.dry_sequence_breakers):
            hint = "give single characters"
            raise unsupported("dry_sequence_breakers", "dry_sequence_breakers has longer texts", hint)
        on = {
            "dry": (self.dry_multiplier or 0) > 0,
            "top-n-sigma": (self.top_n_sigma or 0) > 0,
            "typical": (self.typical_p or 1) < 1,
            "xtc": (self.xtc_probability or 0) > 0,
            "mirostat": self.mirostat == 2,
        }
        return [self._strategy(name, breakers) for name, is_on in on.items() if is_on]

    def _strategy(self, name: str, breakers: str) -> Strategy:
        fields = {field: option for field, (sampler, option) in _OPTIONS.items() if sampler == name}
        given: dict[str, Any] = {option: getattr(self, field) for field, option in fields.items()}
        if name == "dry" and self.dry_sequence_breakers is not None:
            given["breakers"] = breakers
        try:
            return strategy(name, **{option: value for option, value in given.items() if value is not None})
        except InputError as error:
            (field,) = (
                field for field, option in fields.items() if error.what.startswith(f"strategy {name}: {option} ")
            )
            wrong = error.what.removeprefix(f"strategy {name}: {fields[field]}")
            raise invalid(field, f"{field}{wrong}", error.hint) from error


def named_strategies(given: Sequence[Mapping[str, Any]] | None) -> list[Strategy]:
    """The option `strategies`, given by names and options.

    Raises:
        RequestError: one of them is wrong; the error names it.
    """
    found = []
    for index, each in enumerate(given or ()):
        field = f"strategies[{index}]"
        if not isinstance(each.get("name"), str):
            raise invalid(field, f"{field} has no name", 'give {"name": ...} and the options of that strategy')
        try:
            found.append(strategy(**each))
        except InputError as error:
            raise invalid(field, f"{field}: {error.what}", error.hint) from error
    return found
