"""One method on prompts, timed and observed: the parts that all tables share."""
