"""Sandboxed processes for untrusted programs (chat templates, tokenizer rules): the kernel limits their time, memory and files."""
