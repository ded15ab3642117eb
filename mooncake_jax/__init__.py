"""Mooncake's KVCache-centric disaggregated LLM serving (arXiv 2407.00079), open, in JAX."""
