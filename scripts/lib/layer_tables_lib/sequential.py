"""LSTM-PTB, BERT-base, GPT-2, a Llama, ViT-B and extreme classification: linear maps over sequences."""

from __future__ import annotations

from .layers import Table


def lstm_ptb() -> Table:
    """Embedding, two LSTM layers of 1500, decoder; 10 000 words, 35 tokens per sample."""
    table, hidden, words, tokens = Table(), 1500, 10_000, 35
    # looking up a row is no multiplication; its gradient is one addition for every element
    table.add("embedding.weight", (words, hidden), hidden * tokens)
    for layer in (1, 2):
        for side in ("input", "hidden"):
            table.add(f"lstm{layer}.{side}.weight", (4 * hidden, hidden), 4 * hidden * hidden * tokens)
        for side in ("input", "hidden"):
            table.add(f"lstm{layer}.{side}.bias", (4 * hidden,), 4 * hidden * tokens)
    table.linear("decoder", hidden, words, tokens)
    return table


def bert_base() -> Table:
    """12 layers of 768 with 12 heads, 30 522 word pieces, 128 tokens per sample, with the pooler."""
    table, width, inner, tokens = Table(), 768, 3072, 128
    for name, rows in (("word", 30_522), ("position", 512), ("token_type", 2)):
        table.add(f"embeddings.{name}.weight", (rows, width), width * tokens)
    table.norm("embeddings.norm", width, tokens)
    for layer in range(12):
        name = f"layer{layer + 1}"
        for part in ("query", "key", "value", "attention_output"):
            table.linear(f"{name}.{part}", width, width, tokens)
        table.norm(f"{name}.attention_norm", width, tokens)
        table.linear(f"{name}.inner", width, inner, tokens)
        table.linear(f"{name}.outer", inner, width, tokens)
        table.norm(f"{name}.norm", width, tokens)
    table.linear("pooler", width, width)
    return table


def _block(table: Table, name: str, width: int, tokens: int, seen: float) -> None:
    """A transformer's block as GPT-2 and ViT have it; `seen` places that a token attends to, on average."""
    table.norm(f"{name}.norm1", width, tokens)
    table.linear(f"{name}.attention", width, 3 * width, tokens)
    # scores and their sums are no parameter's: their gradients come between this one's and the next one's
    table.linear(f"{name}.projection", width, width, tokens)
    row, shape, work = table.rows[-2]
    table.rows[-2] = row, shape, work + int(2 * width * tokens * seen)
    table.norm(f"{name}.norm2", width, tokens)
    table.linear(f"{name}.inner", width, 4 * width, tokens)
    table.linear(f"{name}.outer", 4 * width, width, tokens)


def _gpt2(layers: int, width: int) -> Table:
    """50 257 words, 1024 tokens per sample; the last layer's weights are those of the embedding."""
    table, words, tokens = Table(), 50_257, 1024
    table.add("word.weight", (words, width), width * tokens)
    table.add("position.weight", (tokens, width), width * tokens)
    for layer in range(layers):
        _block(table, f"layer{layer + 1}", width, tokens, tokens / 2)
    table.norm("norm", width, tokens)
    # backward goes through the last layer first, and its weights' gradient is complete with the embedding's
    row, shape, work = table.rows[-1]
    table.rows[-1] = row, shape, work + words * width * tokens
    return table


def gpt2_small() -> Table:
    """12 layers of 768."""
    return _gpt2(12, 768)


def gpt2_medium() -> Table:
    """24 layers of 1024."""
    return _gpt2(24, 1024)


def llama_1b() -> Table:
    """22 layers of 2048 as Llama 2 has them: 32 heads, 4 for keys and values; 32 000 words, 2048 tokens."""
    table, width, inner, words, tokens = Table(), 2048, 5632, 32_000, 2048
    keys = width // 32 * 4
    table.add("word.weight", (words, width), width * tokens)
    for layer in range(22):
        name = f"layer{layer + 1}"
        table.add(f"{name}.norm1.weight", (width,), width * tokens)
        for part, rows in (("query", width), ("key", keys), ("value", keys), ("output", width)):
            table.linear(f"{name}.{part}", width, rows, tokens, bias=False)
        row, shape, work = table.rows[-1]
        table.rows[-1] = row, shape, work + width * tokens * tokens
        table.add(f"{name}.norm2.weight", (width,), width * tokens)
        for part in ("gate", "up"):
            table.linear(f"{name}.{part}", width, inner, tokens, bias=False)
        table.linear(f"{name}.down", inner, width, tokens, bias=False)
    table.add("norm.weight", (width,), width * tokens)
    table.linear("head", width, words, tokens, bias=False)
    return table


def vit_base() -> Table:
    """ViT-B/16: 12 layers of 768 over 196 patches of 16 x 16 and a class token; 224 x 224, 1000 classes."""
    table, width, tokens = Table(), 768, 197
    table.add("class_token", (1, 1, width), width)
    table.add("position", (1, tokens, width), width * tokens)
    table.conv("patch", (3, width), (16, 16), (14, 14), bias=True)
    for layer in range(12):
        _block(table, f"layer{layer + 1}", width, tokens, tokens)
    table.norm("norm", width, tokens)
    table.linear("classifier", width, 1000)
    return table


def xml_one_layer() -> Table:
    """DRAGONN's extreme classification: one linear layer without bias, 4096 features, 30 938 labels."""
    table = Table()
    table.linear("output", 4096, 30_938, bias=False)
    return table
