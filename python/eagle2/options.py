"""Options that several commands have. What cannot be is refused before anything is loaded."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        help="Folder of a causal LM; default: the embedded SmolLM2-135M.",
    ),
]
Target = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Folder of the causal LM that it is for."),
]
Head = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Folder of its EAGLE-1/2 or EAGLE-3 head."),
]
Threads = Annotated[
    int | None, typer.Option(min=1, max=1024, help="CPU threads; default: torch's choice.")
]
Seed = Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Of the sampling noise.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most new tokens of each answer.")]
