"""Steps as they ran: traced, told by task, watched during training, beside what was predicted."""
