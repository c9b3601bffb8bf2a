"""Port mappings: a home's router is asked to let other machines dial this one."""
