"""Why a plan was chosen: bytes, times, places, resources, rules, and what others lose on."""
