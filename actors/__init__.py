"""The data plane: tree, rule, messages, schedules, engines, drafters, links, and thin Ray shells round them."""
