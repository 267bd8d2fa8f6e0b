"""What all sections of a recipe have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


def operational(default: Any, **kwargs: Any) -> Any:
    """A field that is not part of the run's identity."""
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


def _is_number(annotation: Any) -> bool:
    """Whether a field takes numbers and no truth values, such as ``int`` or ``float | None``."""
    kinds = get_args(annotation) or (annotation,)
    return bool({int, float} & set(kinds)) and bool not in kinds


_SMALLEST, _LARGEST = 1e-30, 1e30


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _yes_is_no_number(cls, values: Any) -> Any:
        """Refuse ``yes`` for a number: it is true in YAML, and pydantic would take it for 1."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and _is_number(field.annotation):
                raise ValueError(f"{name}: expected a number, not {value} ({'yes' if value else 'no'} in YAML)")
        return values

    @model_validator(mode="before")
    @classmethod
    def _no_empty_paths(cls, values: Any) -> Any:
        """Refuse an empty path, which would be the current folder."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if value == "" and field is not None and Path in (field.annotation, *get_args(field.annotation)):
                raise ValueError(f"{name}: the path is empty; pass one, or `.` for the current folder")
        return values

    @model_validator(mode="after")
    def _numbers_can_be_computed_with(self) -> Section:
        """Refuse numbers that float32 does not hold or that become infinite in a sum or a quotient."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float) and number and not _SMALLEST <= abs(number) <= _LARGEST:
                    raise ValueError(f"{name} {number:g}: must be 0, or between {_SMALLEST:g} and {_LARGEST:g} in size")
        return self

    def identity(self) -> dict[str, Any]:
        """All settings that determine the run's numbers, as nested JSON values."""
        kept: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("operational"):
                continue
            value = getattr(self, name)
            if isinstance(value, Section):
                if section := value.identity():
                    kept[name] = section
            elif isinstance(value, tuple):
                kept[name] = list(value)
            else:
                kept[name] = str(value) if isinstance(value, Path) else value
        return kept
