"""Models without a KV cache: vectors of texts, and scores of pairs of texts."""
