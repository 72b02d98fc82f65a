"""Models of Hugging Face transformers inside a module, made to attend over ranks."""
