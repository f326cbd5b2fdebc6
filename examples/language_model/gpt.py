"""A language model: a small GPT that learns to write like Python's own help texts, byte by byte.

    torchrun --nproc_per_node=2 ddp_training.py --config examples/language_model/config.yaml

The text comes with Python itself: the topics of help(), about 450 KB. A sample of what the model
writes, after an export of its weights to exports/gpt:

    python ddp_training.py export runs/NAME --output exports/gpt
    python -m examples.language_model.gpt exports/gpt
"""

import sys
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file
from torch import nn

CONTEXT, NUM_BYTES = 64, 256


class Pieces(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """(bytes (CONTEXT,), the byte after each (CONTEXT,)) of consecutive pieces of a text."""

    uses_randomness = False

    def __init__(self, text: bytes) -> None:
        self.codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.codes[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return piece[:-1], piece[1:]


def pieces(train: bool) -> Pieces:
    """Return all topics but every tenth one, or those."""
    names = [name for number, name in enumerate(sorted(topics)) if (number % 10 > 0) == train]
    return Pieces("\n\n".join(topics[name] for name in names).encode())


class GPT(nn.Module):
    """(N, T) bytes -> (N, T, 256) logits of the byte after each."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(NUM_BYTES, width), nn.Embedding(CONTEXT, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.1)
        self.near = nn.Conv1d(width, width, 4, padding=3)  # of the last 4 bytes: learned soonest
        how = {"activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, **how)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_BYTES))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        length = codes.shape[1]
        x = self.embed(codes) + self.place(torch.arange(length, device=codes.device))
        x = x + self.near(x.mT)[:, :, :length].mT
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        return self.head(self.blocks(x, mask=mask, is_causal=True))


@torch.no_grad()
def write(model: nn.Module, text: str, length: int = 300) -> str:
    """Let model go on with text, byte by byte."""
    codes = torch.tensor([list(text.encode())])
    for _ in range(length):
        chances = (model(codes[:, -CONTEXT:])[:, -1] / 0.7).softmax(dim=1)
        codes = torch.cat([codes, torch.multinomial(chances, 1)], dim=1)
    return bytes(codes[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    model = GPT().eval()
    model.load_state_dict(load_file(f"{sys.argv[1]}/model.safetensors"))
    torch.manual_seed(0)
    print(write(model, "The "))
