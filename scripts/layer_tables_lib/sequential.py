"""LSTM-PTB, BERT-base and the extreme-classification model: linear maps over sequences."""

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


def xml_one_layer() -> Table:
    """DRAGONN's extreme classification: one linear layer without bias, 4096 features, 30 938 labels."""
    table = Table()
    table.linear("output", 4096, 30_938, bias=False)
    return table
