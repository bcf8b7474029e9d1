"""What `run.py --help` says; without Hydra, which takes seconds to list groups within groups."""

from __future__ import annotations

import yaml

from lra import CONFIGS


def help_text() -> str:
    """The text of configs/hydra/help/lra.yaml, with the groups whose option a user chooses."""
    parts = yaml.safe_load((CONFIGS / "hydra" / "help" / "lra.yaml").read_text(encoding="utf-8"))
    groups = [
        f"{folder.name}: {', '.join(sorted(path.stem for path in folder.glob('*.yaml')))}"
        for folder in sorted(CONFIGS.iterdir())
        if any(folder.glob("*.yaml"))  # others hold what follows from these choices
    ]
    text = parts["template"].replace("$APP_CONFIG_GROUPS", "\n".join(groups))
    for name in ("header", "footer"):
        text = text.replace(f"${{hydra.help.{name}}}", parts[name])
    return str(text).strip()
