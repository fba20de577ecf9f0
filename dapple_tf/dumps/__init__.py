"""Dumps of steps to a directory: graphs after each pass, schedule, drawings."""
