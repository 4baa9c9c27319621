"""What every picture and table of a report says to a reader who has never seen one: what it is, what to look at."""

_HILL = (
    "Left to right is one run of the step, upwards is memory: it piles up in the forward pass and is worn off in the "
    "backward pass. "
)

NOTES = {
    "memory": _HILL
    + "Look at how the plan lowers the hill: it keeps less of the forward pass (blue) and computes it again (orange) "
    "when the backward pass wants it. The curves are the planner's model; what counts is the measured peak, which "
    "stays below the budget.",
    "plain memory": _HILL
    + "Look at the top of the hill: it stays below the budget as it is. The curve is the "
    "planner's model; what counts is the measured peak.",
    "loops": "A loop is drawn with the memory of one iteration; what it saves of all of them appears at its end.",
    "copies": "Underneath is what goes to host memory and comes back beside the kernels: of {seconds} something "
    "is on its way there for {gone}, and back for {back}.",
    "values": "What the forward pass makes and the backward pass wants, the largest first. Look at the second column: "
    "“save” keeps it in memory, “recompute” throws it away and computes it again before that stage of the backward "
    "pass (0 is the first), “offload” has it in host memory meanwhile, “drop” throws it away because nothing "
    "needs it any more.",
    "modules": "The same bytes by module of the model. Look for the longest bars: that is where memory is; the last "
    "column says what recomputing there takes.",
    "peak": "What the compiled program has in memory when it needs most, read off the compiler's own schedule, besides "
    "arguments and outputs; “other” is the update's, or the compiler's own. Look here first if you want to save more: "
    "only what is in this list counts.",
    "rounds": "Each row is a plan that was compiled. Look at predicted against compiled peak: where they differ, the "
    "planner corrected its model by the difference and planned again. The cheapest plan that fits was taken; the gap "
    "is how much better, at most, another could be in the planner's model.",
    "verified": "Read from the very program that runs, not estimated. The last row is what is left of the budget.",
    "not compiled": "Nothing was compiled (`Planning(verify=False)`): all figures are the planner's model. Plan with "
    "`Planning(verify=True)` to have the compiler confirm them.",
}
