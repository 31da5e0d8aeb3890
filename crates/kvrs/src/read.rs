//! Reading back: lengths, positions and what is stored, decoded.

use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_codec::{Side, ViewMut};
use kvrs_core::page::Entry;
use kvrs_core::{Error, Result, SeqId};

/// What a head stores, decoded to f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    /// Keys `[tokens, key_dim]`, after RoPE.
    pub keys: Vec<f32>,
    /// Values `[tokens, value_dim]`.
    pub values: Vec<f32>,
    /// Position of each token, ascending.
    pub positions: Vec<i64>,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

impl<B: Backend> KvStore<B> {
    /// Tokens that were appended to a layer, or to every layer.
    ///
    /// # Errors
    /// [`Error::Sequence`] for an unknown id, [`Error::Argument`] for a layer out of range.
    pub fn length(&self, seq: SeqId, layer: Option<usize>) -> Result<usize> {
        if let Some(layer) = layer {
            self.layer(layer)?;
        }
        let row = self.row(seq)?;
        let sequence = row.read_parked()?;
        Ok(layer.map_or_else(|| sequence.length(), |layer| sequence.layers[layer].length))
    }

    /// Original positions of the tokens that a head still has, ascending.
    ///
    /// # Errors
    /// As [`KvStore::length`], and [`Error::Argument`] for a head out of range.
    pub fn kept_positions(&self, seq: SeqId, layer: usize, head: usize) -> Result<Vec<i64>> {
        self.check_head(layer, head)?;
        let row = self.row(seq)?;
        let sequence = row.read()?;
        let start = sequence.start();
        let indices = sequence.layers[layer].tables[head].live_indices();
        Ok(indices.into_iter().map(|i| start + i as i64).collect())
    }

    /// Decodes what a head stores: for debugging and tests.
    ///
    /// # Errors
    /// As [`KvStore::kept_positions`].
    pub fn decode(&self, layer: usize, seq: SeqId, head: usize) -> Result<Decoded> {
        self.check_head(layer, head)?;
        let row = self.row(seq)?;
        let sequence = row.read()?;
        let shape = &self.layer(layer)?.codec.shape;
        let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
        let n = sequence.layers[layer].tables[head].kept();
        let mut decoded = Decoded {
            keys: vec![0.0; n * key_dim],
            values: vec![0.0; n * value_dim],
            positions: vec![0; n],
            key_dim,
            value_dim,
        };
        self.decode_head(layer, &sequence, head, |i, position, k, v| {
            decoded.keys[i * key_dim..(i + 1) * key_dim].copy_from_slice(k);
            decoded.values[i * value_dim..(i + 1) * value_dim].copy_from_slice(v);
            decoded.positions[i] = position;
        })?;
        self.backend.flush()?;
        Ok(decoded)
    }

    /// Decodes sequences into the caller's tensors `[B, kv_heads, T, dim]` in host memory, for engines whose own
    /// attention is to be used. Returns the tokens of each row and zeroes the rest of it.
    ///
    /// # Errors
    /// [`Error::Device`] for tensors elsewhere, [`Error::Shape`] for tensors that do not fit, [`Error::Sequence`] if heads keep different numbers of
    /// tokens.
    pub fn decode_into(
        &self,
        layer: usize,
        seqs: &[SeqId],
        keys: &mut ViewMut<'_>,
        values: &mut ViewMut<'_>,
    ) -> Result<Vec<usize>> {
        let shape = &self.layer(layer)?.codec.shape;
        crate::input::check_host("k_out", keys.place())?;
        crate::input::check_host("v_out", values.place())?;
        crate::input::check_shape("k_out", keys.shape(), seqs.len(), shape.kv_heads, shape.key_dim)?;
        crate::input::check_shape("v_out", values.shape(), seqs.len(), shape.kv_heads, shape.value_dim)?;
        let rows = self.rows(seqs)?;
        let rows = rows.read()?;
        let room = keys.shape()[2].min(values.shape()[2]);
        let counts = rows.iter().map(|s| uniform_count(s, layer, room)).collect::<Result<Vec<_>>>()?;
        for (b, sequence) in rows.iter().enumerate() {
            for head in 0..shape.kv_heads {
                self.decode_head(layer, sequence, head, |i, _, k, v| {
                    keys.write_row([b, head, i], k);
                    values.write_row([b, head, i], v);
                })?;
                zero_rows(keys, b, head, counts[b]);
                zero_rows(values, b, head, counts[b]);
            }
        }
        self.backend.flush()?;
        Ok(counts)
    }

    fn decode_head(
        &self,
        layer: usize,
        sequence: &Sequence<B::Chunk>,
        head: usize,
        mut each: impl FnMut(usize, i64, &[f32], &[f32]),
    ) -> Result<()> {
        let plan = self.layer(layer)?;
        let (table, start) = (&sequence.layers[layer].tables[head], sequence.start());
        let indices = |entry: &Entry<_>| entry.live_slots().map(|(_, index)| index).collect::<Vec<_>>();
        let stored: Vec<usize> = table.entries().flat_map(indices).collect();
        let (ascending, mut stored) = (table.live_indices(), stored.into_iter());
        self.each_live(plan, head, table, start, [Side::Key, Side::Value], |[k, v]| {
            let index = stored.next().expect("an index per live token");
            each(ascending.partition_point(|i| *i < index), start + index as i64, k, v);
        });
        Ok(())
    }

    fn check_head(&self, layer: usize, head: usize) -> Result<()> {
        let heads = self.layer(layer)?.codec.shape.kv_heads;
        if head >= heads {
            return Err(Error::argument("head", head, format!("0..{heads}")));
        }
        Ok(())
    }
}

fn uniform_count<C>(sequence: &Sequence<C>, layer: usize, room: usize) -> Result<usize> {
    let counts: Vec<usize> = sequence.layers[layer].tables.iter().map(kvrs_core::page::Table::kept).collect();
    let most = counts.iter().copied().max().unwrap_or(0);
    if counts.iter().any(|n| *n != most) {
        return Err(Error::sequence(
            "seqs",
            format!("heads with {counts:?} tokens"),
            "heads that keep equally many",
        ));
    }
    if most > room {
        return Err(Error::shape("k_out", format!("{room} tokens"), format!("at least {most}")));
    }
    Ok(most)
}

fn zero_rows(out: &mut ViewMut<'_>, row: usize, head: usize, from: usize) {
    let [_, _, tokens, dim] = out.shape();
    let zeros = vec![0.0; dim];
    (from..tokens).for_each(|t| out.write_row([row, head, t], &zeros));
}
