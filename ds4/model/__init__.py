"""Models without devices: tokenizer, chat, tool calls, and one package per family."""
