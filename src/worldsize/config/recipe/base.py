"""What all sections of a recipe have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def operational(default: Any, **kwargs: Any) -> Any:
    """A field that is not part of the run's identity."""
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

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
