"""Reading files that anybody may have written: nothing in them is run."""
