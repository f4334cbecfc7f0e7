"""ViT whose parameters are replaced between steps, by `load_state_dict` with `assign`."""

from __future__ import annotations

from dataclasses import replace

from models import vit

CASE = replace(vit.CASE, assigns=True)
