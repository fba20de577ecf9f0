"""Steps as they were: traced, told apart by task and device, beside what was expected."""
