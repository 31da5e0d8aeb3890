//! Whether what a file says of a sequence can have come about: everything that appending, attention and eviction rely on.

use super::header::wrong;
use super::state::{HeadImage, LayerImage};
use crate::compile::{LayerPlan, RAW};
use crate::evict::{LayerEvict, Outcome};
use kvrs_core::Result;
use kvrs_core::page::{EntryParts, RAW_SLOTS, Slots, Zone};
use kvrs_core::policy::{Attention, Fold, History, Queries};

/// Longest sequence.
const MAX_TOKENS: usize = 1 << 30;

/// Checks a layer of `tokens` tokens; `what` names it.
pub(super) fn layer(what: &str, plan: &LayerPlan, tokens: usize, image: &LayerImage) -> Result<()> {
    let check = |field: &str, ok: bool, got: usize, allowed: String| {
        if ok { Ok(()) } else { Err(wrong(what, field, got, allowed)) }
    };
    let LayerImage { length, origin, longest, .. } = *image;
    let sinks = plan.rule.sinks;
    check("length", length == tokens, length, format!("{tokens}, that of the sequence"))?;
    check("length", length <= MAX_TOKENS, length, format!("at most {MAX_TOKENS}"))?;
    check("longest", (length..=MAX_TOKENS).contains(&longest), longest, format!("{length}..={MAX_TOKENS}"))?;
    let origins = sinks..=length.max(sinks);
    check("origin", origins.contains(&origin), origin, format!("{origins:?}"))?;
    if !plan.rule.stays_raw() {
        let due = origin + plan.rule.recent + plan.rule.group;
        check("origin", length < due, origin, "a group that is due is sealed".to_owned())?;
    }
    policy(what, plan, image)?;
    image.heads.iter().enumerate().try_for_each(|(group, head)| {
        let what = format!("{what}, head {group}");
        zones(&what, plan, group, image, head)?;
        statistics(&what, plan, image, head)
    })
}

fn policy(what: &str, plan: &LayerPlan, image: &LayerImage) -> Result<()> {
    let Some(evict) = &plan.evict else {
        let idle = image.budget.is_none() && image.outcome == Outcome::Waiting;
        let idle = idle && image.heads.iter().all(|head| head.evicted == 0);
        return if idle {
            Ok(())
        } else {
            Err(wrong(what, "budget", "a policy's", "none: the layer has no policy"))
        };
    };
    let least = evict.policy.least_budget(plan.rule.sinks, plan.rule.recent);
    match image.budget.filter(|budget| *budget < least) {
        Some(budget) => Err(wrong(what, "budget", budget, format!("none, or at least {least}"))),
        None => Ok(()),
    }
}

/// Checks each zone by itself, and that live tokens ascend through all of them.
fn zones(what: &str, plan: &LayerPlan, group: usize, layer: &LayerImage, head: &HeadImage) -> Result<()> {
    let zone = |zone: Zone| head.entries.iter().filter(move |(of, _)| *of == zone).map(|(_, parts)| parts);
    if !head.entries.iter().map(|(zone, _)| *zone as usize).is_sorted() {
        return Err(wrong(what, "zone", "another order", "sinks, sealed pages, window"));
    }
    let length = layer.length;
    let sinks: Vec<&EntryParts> = zone(Zone::Sinks).collect();
    raw_run(what, &sinks, length.min(plan.rule.sinks), (|first| first % RAW_SLOTS == 0, "multiples of 16"))?;
    let window: Vec<&EntryParts> = zone(Zone::Window).collect();
    if plan.rule.stays_raw() {
        raw_window(what, &window, length)?;
    } else {
        let whole = (length - length.min(layer.origin)).div_ceil(RAW_SLOTS);
        let starts = window.first().is_none_or(|entry| first(entry) == layer.origin);
        if window.len() != whole || !starts {
            let got = format!("{} pages", window.len());
            return Err(wrong(what, "window", got, format!("{whole} pages, from token {} on", layer.origin)));
        }
        raw_run(what, &window, length, (|_| true, ""))?;
        if window.windows(2).any(|pair| first(pair[1]) != first(pair[0]) + RAW_SLOTS) {
            return Err(wrong(what, "window", "a gap", "pages without one"));
        }
    }
    let sealed: Vec<&EntryParts> = zone(Zone::Sealed).collect();
    for (i, entry) in sealed.iter().enumerate() {
        sealed_page(&format!("{what}, sealed page {i}"), plan, group, length, entry)?;
        if entry.live == 0 && i + 1 < sealed.len() {
            return Err(wrong(what, "live bits", 0, "a token in each sealed page but the last"));
        }
    }
    live_tokens(what, length, head)
}

/// First index of a page.
fn first(entry: &EntryParts) -> usize {
    index(entry, 0)
}

fn index(entry: &EntryParts, slot: usize) -> usize {
    match &entry.slots {
        Slots::Run { first } => *first as usize + slot,
        Slots::Gathered(indices) => indices[slot] as usize,
    }
}

/// Whether a raw page may take more tokens.
fn open_raw(what: &str, entry: &EntryParts) -> Result<()> {
    let Slots::Run { first } = entry.slots else { return Err(wrong(what, "gathered", 1, "0 in raw pages")) };
    if entry.class != RAW || entry.closed || usize::from(entry.count) > RAW_SLOTS {
        let got = format!("class {}, closed {}, {} tokens", entry.class, entry.closed, entry.count);
        return Err(wrong(
            what,
            &format!("raw page at {first}"),
            got,
            "class 0, not closed, up to 16 tokens",
        ));
    }
    live_bits(what, entry)
}

fn live_bits(what: &str, entry: &EntryParts) -> Result<()> {
    if entry.count < 64 && entry.live >> entry.count != 0 {
        let got = format!("{:x}", entry.live);
        return Err(wrong(what, "live bits", got, format!("none beyond {} filled slots", entry.count)));
    }
    Ok(())
}

/// Checks ascending raw pages, each full or filled up to `end`.
fn raw_run(
    what: &str,
    entries: &[&EntryParts],
    end: usize,
    (starts, allowed): (impl Fn(usize) -> bool, &str),
) -> Result<()> {
    for (i, entry) in entries.iter().enumerate() {
        open_raw(what, entry)?;
        let (at, count) = (first(entry), usize::from(entry.count));
        if !starts(at) || i > 0 && at < first(entries[i - 1]) + RAW_SLOTS {
            return Err(wrong(what, "first", at, format!("ascending page starts {allowed}").trim_end()));
        }
        if at >= end || count != RAW_SLOTS.min(end - at) {
            let allowed = format!("full pages, or one that ends at {end}");
            return Err(wrong(what, "count", format!("{count} from {at} on"), allowed));
        }
    }
    Ok(())
}

/// Checks the window of a layer that seals nothing: pages may be missing, but those that are there have room for 16
/// tokens each, and the last one is full or ends with the sequence.
fn raw_window(what: &str, entries: &[&EntryParts], length: usize) -> Result<()> {
    for (i, entry) in entries.iter().enumerate() {
        open_raw(what, entry)?;
        let (at, count) = (first(entry), usize::from(entry.count));
        let full = count == RAW_SLOTS && at + RAW_SLOTS <= length;
        let last = i + 1 == entries.len() && at + count == length;
        if !(full || last) {
            let allowed = format!("16, or up to {length} in the last page");
            return Err(wrong(what, "count", format!("{count} from {at} on"), allowed));
        }
        if i > 0 && at < first(entries[i - 1]) + RAW_SLOTS {
            return Err(wrong(what, "first", at, "ascending page starts"));
        }
    }
    Ok(())
}

fn sealed_page(what: &str, plan: &LayerPlan, group: usize, length: usize, entry: &EntryParts) -> Result<()> {
    let classes = plan.codec.classes[group].len();
    let packs = plan.target() != RAW;
    let class = usize::from(entry.class);
    if class >= classes || packs != (entry.class != RAW) {
        let allowed = if packs { format!("1..{classes}") } else { "0".to_owned() };
        return Err(wrong(what, "class", class, allowed));
    }
    let slots = plan.class(group, entry.class).desc.slots as usize;
    let count = usize::from(entry.count);
    if count > slots {
        return Err(wrong(what, "count", count, format!("1..={slots}")));
    }
    live_bits(what, entry)?;
    let run = matches!(entry.slots, Slots::Run { .. });
    let open = run && entry.class == plan.target() && packs && count.is_multiple_of(plan.rule.group);
    if !(entry.closed || open && first(entry) + count <= length) {
        let allowed = format!("true, or whole groups of {} tokens below {length}", plan.rule.group);
        return Err(wrong(what, "closed", "false", allowed));
    }
    let ascending = match &entry.slots {
        Slots::Gathered(indices) => indices.is_sorted_by(|a, b| a < b),
        Slots::Run { first } => first.checked_add(count as u32).is_some(),
    };
    if ascending { Ok(()) } else { Err(wrong(what, "indices", "another order", "ascending ones")) }
}

/// Checks that live tokens ascend through all pages and lie below the length.
fn live_tokens(what: &str, length: usize, head: &HeadImage) -> Result<()> {
    let mut next = 0;
    for (_, entry) in &head.entries {
        for slot in (0..usize::from(entry.count)).filter(|slot| entry.live >> slot & 1 == 1) {
            let token = index(entry, slot);
            if !(next..length).contains(&token) {
                return Err(wrong(
                    what,
                    "a live token",
                    token,
                    format!("ascending, from {next} below {length}"),
                ));
            }
            next = token + 1;
        }
    }
    Ok(())
}

/// Counters for the queries that a policy counts.
pub(super) fn history(evict: Option<&LayerEvict>, seen: usize, counts: Vec<[u16; 2]>) -> Option<History> {
    match evict?.policy.needs().attention? {
        Attention { fold: Fold::Above, queries: Queries::Last(n), .. } => History::restore(n, seen, counts),
        _ => None,
    }
}

fn statistics(what: &str, plan: &LayerPlan, layer: &LayerImage, head: &HeadImage) -> Result<()> {
    let kept: usize = head.entries.iter().map(|(_, entry)| entry.live.count_ones() as usize).sum();
    let check = |field: &str, ok: bool, got: usize, allowed: &str| {
        if ok { Ok(()) } else { Err(wrong(what, field, got, allowed)) }
    };
    check("evicted", head.evicted <= layer.longest, head.evicted, &format!("0..={}", layer.longest))?;
    let stepwise = plan.evict.as_ref().filter(|evict| evict.acts_later());
    let asked = stepwise.map(|evict| evict.policy.needs());
    let attention = asked.is_some_and(|needs| needs.attention.is_some());
    let most = if attention { kept } else { 0 };
    check("attention", head.attention.len() <= most, head.attention.len(), &format!("up to {most} numbers"))?;
    let norms = if asked.is_some_and(|needs| needs.key_norms) { kept } else { 0 };
    check("norms", head.norms.len() == norms, head.norms.len(), &format!("{norms} numbers"))?;
    let bad = head.attention.iter().chain(&head.norms).find(|x| !(x.is_finite() && **x >= 0.0));
    if let Some(bad) = bad {
        return Err(wrong(what, "attention or norms", bad, "finite numbers from 0 on"));
    }
    if let Some((seen, counts)) = &head.history {
        check("history", counts.len() <= most, counts.len(), &format!("up to {most} counts"))?;
        let fits = history(stepwise, *seen, counts.clone()).is_some();
        check("seen", fits, *seen, "a policy that counts queries, and at most half of those")?;
    }
    Ok(())
}
