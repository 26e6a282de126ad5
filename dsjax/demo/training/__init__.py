"""The scripts that made the demo model: corpus, tokenizer, training data, training. Nothing else imports them."""
