"""Why a plan is the plan: bytes, times, places, resources, rules, and who lost on what."""
