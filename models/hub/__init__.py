"""Models of the Hugging Face Hub: their ids, downloads and local copies."""
