"""What steps are made of, written to a directory: graphs after each pass, schedule, drawings."""
