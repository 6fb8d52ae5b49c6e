"""Products and attention of bf16 tiles by oneDNN, if the library and the processor can multiply bf16."""
