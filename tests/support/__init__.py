"""What tests share: tiny models, foreign graph layouts, a fake hub, adversarial drafters, oracles."""
