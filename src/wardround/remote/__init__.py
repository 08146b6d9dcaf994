"""A study between real machines: what a site does with a request, what the hub does with answers, and the commands."""
