"""Steering: LoRA adapters and control vectors, chosen by each request."""
