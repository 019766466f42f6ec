"""Whether a request's grammar can be honoured, found out in a process that may be lost."""

from __future__ import annotations

from ..proto.model_config import ModelConfig
from ..proto.structured import StructuredOutputsParams


class GrammarChecker:
    """Checks grammars. Make it inside a running event loop; its process starts at the first check."""

    def __init__(self, folder: str, model: ModelConfig):
        self.folder, self.model = folder, model

    async def check(self, spec: StructuredOutputsParams) -> None:
        """Return where the grammar can be honoured; else raise ``errors.Refused`` (param "structured_outputs")."""

    def close(self) -> None:
        """End the process."""
